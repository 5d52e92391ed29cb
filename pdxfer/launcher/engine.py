"""The process of one engine: vLLM's API server, or a fake one, with our connector's flags. Pure."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdxfer.config import network
from pdxfer.config.flags import kv_transfer_config
from pdxfer.config.schema import Config
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.machine import Machine
from pdxfer.launcher.names import check_names
from pdxfer.launcher.placement import EnginePlan
from pdxfer.launcher.spec import PortUse, ProcessSpec
from pdxfer.transport.device import device_problem

OUR_VARIABLES = ("PDXFER_*__*",)
"""Settings in the environment: already part of the configuration that children are given."""

LEAVE_S = 5.0
"""Of `engine.stop_timeout_s`: what is left to an engine after its last request."""

OUR_FLAGS = {
    "--model": "model.path, or --model before the --",
    "--served-model-name": "model.served_name",
    "--host": "network.bind",
    "--port": "topology.prefill_port and decode_port, or --port before the --",
    "--kv-transfer-config": "the sections transport, store and router",
}
"""Flags of the engines that the plan gives, and what sets them: an engine elsewhere would be waited for in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the plan depends on."""

    config: Config
    """With `model.path` a directory or a Hugging Face name, no longer `demo`."""
    config_file: str
    """Where the children find the same configuration."""
    machine: Machine
    token: str = ""
    """Bearer token of the engines, from `security.token_file`."""
    vllm_args: tuple[str, ...] = ()
    """Further flags for every engine, after `engine.extra_args`."""


def engine_process(inputs: Inputs, engine: EnginePlan, depends_on: tuple[str, ...] = ()) -> ProcessSpec:
    """The process of one engine."""
    config = inputs.config
    host = network.bind_address(config)
    _check_exposure(config, inputs.token)
    _check_channels(inputs, engine)
    check_names(config)
    _check_flags((*config.engine.extra_args, *inputs.vllm_args))
    is_fake = config.engine.kind == "fake"
    return ProcessSpec(
        name=engine.engine_id,
        argv=_fake_argv(inputs, engine) if is_fake else _vllm_argv(inputs, engine),
        env=_engine_env(inputs, engine),
        unset=(*OUR_VARIABLES, *(("VLLM_CPU_KVCACHE_SPACE",) if config.engine.kv_cache_gib else ())),
        ports=(PortUse(host=host, port=engine.port, key=engine.port_key),),
        ready_url=f"{network.local_url(host, engine.port)}/health",
        ready_timeout_s=config.engine.startup_timeout_s,
        depends_on=depends_on,
        stop_order=1,
        stop_timeout_s=config.engine.stop_timeout_s,
    )


def engine_url(config: Config, engine: EnginePlan) -> str:
    """HTTP base under which proxy and clients reach an engine."""
    return f"http://{network.join(network.advertised(config), engine.port)}"


def _check_exposure(config: Config, token: str) -> None:
    bind = network.bind_address(config)
    if token or config.security.allow_insecure or network.is_loopback(bind):
        return
    raise ConfigError(
        f"engines would listen on {bind} (network.bind, or the way to router.endpoint), reachable from other machines, "
        "but have no token: set security.token_file (and security.keys_dir), or bind to 127.0.0.1"
    )


def _check_channels(inputs: Inputs, engine: EnginePlan) -> None:
    """Minutes before the engine would find out for itself."""
    if engine.gpus and engine.role != "both" and inputs.config.engine.kind != "fake":
        problem = device_problem(inputs.config.transport.channels, inputs.machine.has_nixl)
        if problem:
            raise ConfigError(f"engine {engine.engine_id} on GPU {', '.join(map(str, engine.gpus))}: {problem}")


def _check_flags(args: Sequence[str]) -> None:
    for arg in args:
        flag = arg.partition("=")[0].replace("_", "-")
        if flag in OUR_FLAGS:
            raise ConfigError(f"{arg} is among the flags for vLLM, but pdxfer sets it itself: use {OUR_FLAGS[flag]}")


def _vllm_argv(inputs: Inputs, engine: EnginePlan) -> tuple[str, ...]:
    config = inputs.config
    router = config.router.endpoint if engine.role == "both" else network.router_endpoint(config)
    flags = kv_transfer_config(
        role=engine.role,
        engine_id=engine.engine_id,
        url=engine_url(config, engine),
        router=router,
        config=inputs.config_file,
        extra={"layerwise": config.transport.layerwise},
    )
    return (
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", config.model.path,
        "--served-model-name", served_name(config),
        "--host", network.bind_address(config),
        "--port", str(engine.port),
        *_vllm_flags(config),
        "--kv-transfer-config", flags,
        *config.engine.extra_args,
        *inputs.vllm_args,
    )  # fmt: skip


def _vllm_flags(config: Config) -> list[str]:
    engine = config.engine
    flags = ["--dtype", config.model.dtype]
    numbers = {
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--block-size": engine.block_size,
        "--kv-cache-memory-bytes": int(engine.kv_cache_gib * (1 << 30)),
        "--gpu-memory-utilization": engine.gpu_memory_fraction,
        "--shutdown-timeout": max(1, int(engine.stop_timeout_s - LEAVE_S)),
    }
    for flag, number in numbers.items():
        flags += [flag, str(number)] if number else []
    flags += ["--enforce-eager"] if engine.enforce_eager else []
    flags += [] if engine.prefix_caching else ["--no-enable-prefix-caching"]
    return flags


def _fake_argv(inputs: Inputs, engine: EnginePlan) -> tuple[str, ...]:
    config = inputs.config
    return (
        sys.executable, "-m", "pdxfer.testing.fake_engine",
        "--role", engine.role,
        "--engine-id", engine.engine_id,
        "--model", served_name(config),
        "--host", network.bind_address(config),
        "--port", str(engine.port),
        "--url", engine_url(config, engine),
        "--router", network.router_endpoint(config),
        *(("--otlp-endpoint", config.metrics.otlp_endpoint) if config.metrics.otlp_endpoint else ()),
        *(("--keys", config.security.keys_dir) if config.security.keys_dir else ()),
        *(("--store", msgspec.json.encode(config.store).decode()) if config.store.enabled else ()),
        *(("--codec", msgspec.json.encode(config.codec).decode()) if config.codec.wire != "off" else ()),
        *inputs.vllm_args,
    )  # fmt: skip


def _engine_env(inputs: Inputs, engine: EnginePlan) -> dict[str, str]:
    config = inputs.config
    env = {"PYTHONUNBUFFERED": "1"}
    if config.model.path.startswith("/"):
        env["HF_HUB_OFFLINE"] = "1"
    if inputs.token:
        env["VLLM_API_KEY"] = inputs.token
    if engine.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, engine.gpus))
    if engine.cpus:
        env["VLLM_CPU_OMP_THREADS_BIND"] = engine.cpus
    return env | config.engine.env


def served_name(config: Config) -> str:
    """Name clients ask for."""
    return config.model.served_name or config.model.path.rstrip("/").rpartition("/")[2]
