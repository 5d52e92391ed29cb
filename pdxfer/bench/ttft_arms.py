"""The arms of the TTFT bench as data: the processes of each, on which cores, with which flags. Pure but for Ports.free.

Every engine computes on one core: prefill (or one engine alone) on core 0, decode on core 1. ttft_routes.py says how a
request goes through an arm, the launcher's supervisor runs the processes.
"""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdxfer.bench.ttft_options import MAX_MODEL_LEN
from pdxfer.launcher.spec import ProcessSpec

SERVED_NAME = "demo"
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 2048
KV_CACHE_GIB = 1
PREFILL_CORE, DECODE_CORE = "0", "1"
PREFILL_ENGINE_ID = "P0"
_READY_S = 300.0
_NOT_INHERITED = ("PDXFER_*__*", "VLLM_*", "UCX_*", "NIXL_*", "OMP_*")
"""Settings of the shell must not make one run differ from another."""
_UNPIN_DIR = Path(__file__).with_name("ttft_unpin")
_CONNECTORS = {"nixl-pull": "NixlConnector", "nixl-push": "NixlPushConnector"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Free ports of one arm."""

    prefill: int
    """HTTP, also of one engine alone."""
    decode: int
    proxy: int
    router: int
    controller: int
    prefill_side: int
    """Where vLLM's NIXL connector hands out its metadata."""
    decode_side: int

    @classmethod
    def free(cls) -> "Ports":
        """Ports nobody listens on now, as the OS gives them."""
        probes = {name: socket.create_server(("127.0.0.1", 0)) for name in cls.__dataclass_fields__}
        try:
            return cls(**{name: int(probe.getsockname()[1]) for name, probe in probes.items()})
        finally:
            for probe in probes.values():
                probe.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the two sides run and how they reach each other."""

    prefill_host: str = "127.0.0.1"
    decode_host: str = "127.0.0.1"
    prefill_prefix: tuple[str, ...] = ()
    """Put before a command to run it on the prefill side."""
    decode_prefix: tuple[str, ...] = ()
    """The same for the decode side."""
    is_link: bool = False
    """The sides are joined by a network link: nothing may go around it."""

    @property
    def env(self) -> dict[str, str]:
        """Environment of every engine."""
        return {"UCX_TLS": "tcp"} if self.is_link else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve, ready to be started."""

    name: str
    processes: tuple[ProcessSpec, ...]
    urls: Mapping[str, str] = field(default_factory=dict)
    """`prefill`, `decode`, `proxy` → HTTP base, as far as the arm has them."""


def make_arm(
    name: str, *, model: Path, site: Site, ports: Ports, dtype: str = "bfloat16", sets: Sequence[str] = ()
) -> Arm:
    """The arm of this name. `sets` are further settings of pdxfer, as for `--set`."""
    if name == "one":
        return _one(model, site, ports, dtype)
    if name == "pdxfer":
        return _pdxfer(model, site, ports, dtype, sets)
    return _nixl(name, model, site, ports, dtype)


def _one(model: Path, site: Site, ports: Ports, dtype: str) -> Arm:
    url = _url(site.prefill_host, ports.prefill)
    spec = _vllm(
        "one", model, site.prefill_host, ports.prefill, dtype, PREFILL_CORE, site.env, prefix=site.prefill_prefix
    )
    return Arm(name="one", processes=(spec,), urls={"prefill": url})


def _nixl(name: str, model: Path, site: Site, ports: Ports, dtype: str) -> Arm:
    connector = _CONNECTORS[name.removesuffix("-stock")]
    unpinned = {} if name.endswith("-stock") else {"PYTHONPATH": str(_UNPIN_DIR)}
    common = {"kv_connector": connector, "kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}
    sides = {
        "prefill": (
            site.prefill_host,
            ports.prefill,
            ports.prefill_side,
            PREFILL_CORE,
            "kv_producer",
            PREFILL_ENGINE_ID,
        ),
        "decode": (site.decode_host, ports.decode, ports.decode_side, DECODE_CORE, "kv_consumer", "D0"),
    }
    processes = []
    for side, (host, port, side_port, core, kv_role, engine_id) in sides.items():
        env = site.env | unpinned
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        flags = ("--kv-transfer-config", json.dumps({**common, "kv_role": kv_role, "engine_id": engine_id}))
        prefix = site.decode_prefix if side == "decode" else site.prefill_prefix
        processes.append(_vllm(side, model, host, port, dtype, core, env, flags, prefix))
    urls = {side: _url(host, port) for side, (host, port, *_) in sides.items()}
    return Arm(name=name, processes=tuple(processes), urls=urls)


def _vllm(
    name: str,
    model: Path,
    host: str,
    port: int,
    dtype: str,
    core: str,
    env: Mapping[str, str],
    flags: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
) -> ProcessSpec:
    argv = (
        *prefix,
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model),
        "--served-model-name", SERVED_NAME,
        "--host", host,
        "--port", str(port),
        "--dtype", dtype,
        "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *flags,
    )  # fmt: skip
    own = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "VLLM_HOST_IP": host,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return ProcessSpec(
        name=name,
        argv=argv,
        env=own | dict(env),
        unset=_NOT_INHERITED,
        ready_url=f"{_url(host, port)}/health",
        ready_timeout_s=_READY_S,
    )


def _pdxfer(model: Path, site: Site, ports: Ports, dtype: str, more: Sequence[str]) -> Arm:
    urls = {
        "proxy": _url(site.prefill_host, ports.proxy),
        "prefill": _url(site.prefill_host, ports.prefill),
        "decode": _url(site.decode_host, ports.decode),
    }
    sets = (*_settings(model, site, ports, dtype), *more)
    if not site.is_link:
        whole = _launch("all", sets, f"{urls['proxy']}/ready")
        return Arm(name="pdxfer", processes=(whole,), urls=urls)
    near, far = (*sets, f"network.bind={site.prefill_host}"), (*sets, f"network.bind={site.decode_host}")
    here, engines = site.prefill_prefix, ("prefill", "decode")
    processes = (
        _launch("router", near, f"{_url(site.prefill_host, ports.controller)}/health", (), here, stop_order=2),
        _launch("prefill", near, f"{urls['prefill']}/health", ("router",), here, stop_order=1),
        _launch("decode", far, f"{urls['decode']}/health", ("router",), site.decode_prefix, stop_order=1),
        _launch("proxy", near, f"{urls['proxy']}/ready", ("router", *engines), here),
    )
    return Arm(name="pdxfer", processes=processes, urls=urls)


def _settings(model: Path, site: Site, ports: Ports, dtype: str) -> tuple[str, ...]:
    """What differs from the packaged config: the numbers every arm shares, our ports, and the link."""
    sets = {
        "model.path": str(model),
        "model.served_name": SERVED_NAME,
        "model.dtype": dtype,
        "engine.max_model_len": str(MAX_MODEL_LEN),
        "engine.max_num_seqs": str(MAX_NUM_SEQS),
        "engine.max_num_batched_tokens": str(MAX_NUM_BATCHED_TOKENS),
        "engine.kv_cache_gib": str(KV_CACHE_GIB),
        "engine.prefix_caching": "false",
        "topology.prefill": f'[{{port: {ports.prefill}, cpus: "{PREFILL_CORE}"}}]',
        "topology.decode": f'[{{port: {ports.decode}, cpus: "{DECODE_CORE}"}}]',
        "router.port": str(ports.router),
        "router.min_remote_tokens": "0",
        "controller.port": str(ports.controller),
        "proxy.port": str(ports.proxy),
        "network.ports": "[0, 0]",
    }
    if site.is_link:
        sets |= {
            "router.endpoint": f"tcp://{site.prefill_host}:{ports.router}",
            "transport.channels": "nixl,tcp",
            "security.allow_insecure": "true",
            "engine.env": json.dumps(site.env),
        }
    return tuple(f"{key}={value}" for key, value in sets.items())


def _launch(
    role: str,
    sets: tuple[str, ...],
    ready_url: str,
    depends_on: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    stop_order: int = 0,
) -> ProcessSpec:
    argv = [*prefix, sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", role, "--config", "cpu-1p1d"]
    for setting in sets:
        argv += ["--set", setting]
    return ProcessSpec(
        name=role if role != "all" else "pdxfer",
        argv=tuple(argv),
        unset=_NOT_INHERITED,
        ready_url=ready_url,
        ready_timeout_s=_READY_S,
        depends_on=depends_on,
        stop_order=stop_order,
        stop_timeout_s=60.0,
    )


def _url(host: str, port: int) -> str:
    return f"http://{host}:{port}"
