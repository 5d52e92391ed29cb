"""Config → the processes of this host. Pure: what `--dry-run` prints is what supervise.py starts.

router, store ──▶ engines, all at once ──▶ proxy          started when those before are ready
proxy         ──▶ engines              ──▶ router, store  told to leave, each when those before have left
"""

import sys
from collections.abc import Sequence

import msgspec

from pdxfer.config import network
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.engine import OUR_VARIABLES, Inputs, engine_process
from pdxfer.launcher.placement import EnginePlan, EngineRole, place_engines, place_one
from pdxfer.launcher.spec import PortUse, ProcessSpec

_ROUTER_TIMEOUT_S = 30.0
_PROXY_TIMEOUT_S = 60.0
_STORE_TIMEOUT_S = 60.0
"""To map and clear a large segment."""


def plan_all(inputs: Inputs) -> list[ProcessSpec]:
    """Router, the host's store if engines share one, all engines of the topology, proxy."""
    engines = place_engines(inputs.config, inputs.machine)
    if not any(engine.role == "decode" for engine in engines):
        raise ConfigError("topology.decode is empty: nothing could answer; use at least 1")
    specs = [_router(inputs), *_shared_store(inputs)]
    before = tuple(spec.name for spec in specs)
    specs += [engine_process(inputs, engine, depends_on=before) for engine in engines]
    specs.append(_proxy(inputs, engines))
    _check_distinct(specs)
    return specs


def plan_engine(inputs: Inputs, role: EngineRole, *, engine_id: str = "", port: int = 0) -> list[ProcessSpec]:
    """One engine alone, whose router (if any) runs elsewhere; `both` has its host's store beside it."""
    engine = place_one(inputs.config, inputs.machine, role, engine_id, port)
    store = _shared_store(inputs) if role == "both" else []
    specs = [*store, engine_process(inputs, engine, depends_on=tuple(spec.name for spec in store))]
    _check_distinct(specs)
    return specs


def plan_store(inputs: Inputs) -> list[ProcessSpec]:
    """The store process of a host whose engines are started one by one."""
    specs = _shared_store(inputs)
    if not specs:
        raise ConfigError(
            "--role store needs store.enabled: true and store.shared_memory: the path of the socket to serve; without "
            "them each engine keeps its KV in memory of its own"
        )
    return specs


def _router(inputs: Inputs) -> ProcessSpec:
    config = inputs.config
    host = network.bind_address(config)
    return ProcessSpec(
        name="router",
        argv=_ours("router", inputs),
        unset=OUR_VARIABLES,
        ports=(
            PortUse(host=host, port=config.router.port, key="router.port"),
            PortUse(host=host, port=config.controller.port, key="controller.port"),
        ),
        ready_url=f"{network.local_url(host, config.controller.port)}/health",
        ready_timeout_s=_ROUTER_TIMEOUT_S,
        stop_order=2,
        drains=True,
    )


def _shared_store(inputs: Inputs) -> list[ProcessSpec]:
    """The process that keeps the host's DRAM tier, where the configuration names its socket."""
    config = inputs.config.store
    if not config.enabled or not config.shared_memory:
        return []
    memory = [tier for tier in config.tiers if tier.url.startswith("dram:")]
    section = msgspec.json.encode(msgspec.structs.replace(config, tiers=memory)).decode()
    return [
        ProcessSpec(
            name="store",
            argv=(sys.executable, "-m", "pdxfer.store.server", "--store", section),
            unset=OUR_VARIABLES,
            ready_url=f"unix:{config.shared_memory}",
            ready_timeout_s=_STORE_TIMEOUT_S,
            stop_order=2,
        )
    ]


def _proxy(inputs: Inputs, engines: Sequence[EnginePlan]) -> ProcessSpec:
    config = inputs.config
    host = network.proxy_bind(config)
    has_pair = any(engine.role == "prefill" for engine in engines)
    return ProcessSpec(
        name="proxy",
        argv=_ours("proxy", inputs),
        unset=OUR_VARIABLES,
        ports=(PortUse(host=host, port=config.proxy.port, key="proxy.port"),),
        ready_url=f"{network.local_url(host, config.proxy.port)}/{'ready' if has_pair else 'health'}",
        ready_timeout_s=_PROXY_TIMEOUT_S,
        depends_on=("router", *(engine.engine_id for engine in engines)),
        stop_order=0,
        stop_timeout_s=config.proxy.drain_timeout_s + 5.0,
        drains=True,
    )


def _ours(role: str, inputs: Inputs) -> tuple[str, ...]:
    return (sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", role, "--config", inputs.config_file)


def _check_distinct(specs: Sequence[ProcessSpec]) -> None:
    """No two processes share a name or a port, and each port is known before the start: others are told of it."""
    names: set[str] = set()
    ports: dict[int, tuple[str, str]] = {}
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two processes are named {spec.name!r}: give each engine of the topology its own id")
        names.add(spec.name)
        for use in spec.ports:
            if not use.port:
                raise ConfigError(f"{use.key} is 0, but {spec.name} must be found by others: set it to a port")
            if use.port in ports:
                other, key = ports[use.port]
                raise ConfigError(
                    f"port {use.port} is given to {other} ({key}) and to {spec.name} ({use.key}): change one of them"
                )
            ports[use.port] = (spec.name, use.key)
