"""Config → the processes of this host. Pure: what `--dry-run` prints is what supervise.py starts.

router ──▶ engines, all at once ──▶ proxy          started when those before are ready
proxy  ──▶ engines              ──▶ router         told to leave, each when those before have left
"""

import sys
from collections.abc import Sequence

from pdxfer.config import network
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.engine import OUR_VARIABLES, Inputs, engine_process
from pdxfer.launcher.placement import EnginePlan, EngineRole, place_engines, place_one
from pdxfer.launcher.spec import PortUse, ProcessSpec

_ROUTER_TIMEOUT_S = 30.0
_PROXY_TIMEOUT_S = 60.0


def plan_all(inputs: Inputs) -> list[ProcessSpec]:
    """Router, all engines of the topology, proxy."""
    engines = place_engines(inputs.config, inputs.machine)
    if not any(engine.role == "decode" for engine in engines):
        raise ConfigError("topology.decode is empty: nothing could answer; use at least 1")
    specs = [_router(inputs)]
    specs += [engine_process(inputs, engine, depends_on=("router",)) for engine in engines]
    specs.append(_proxy(inputs, engines))
    _check_distinct(specs)
    return specs


def plan_engine(inputs: Inputs, role: EngineRole, *, engine_id: str = "", port: int = 0) -> list[ProcessSpec]:
    """One engine alone, whose router (if any) runs elsewhere."""
    engine = place_one(inputs.config, inputs.machine, role, engine_id, port)
    return [engine_process(inputs, engine)]


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
    )


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
    )


def _ours(role: str, inputs: Inputs) -> tuple[str, ...]:
    return (sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", role, "--config", inputs.config_file)


def _check_distinct(specs: Sequence[ProcessSpec]) -> None:
    """No two processes share a name or a port."""
    names: set[str] = set()
    ports: dict[int, tuple[str, str]] = {}
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two processes are named {spec.name!r}: give each engine of the topology its own id")
        names.add(spec.name)
        for use in spec.ports:
            if use.port in ports:
                other, key = ports[use.port]
                raise ConfigError(
                    f"port {use.port} is given to {other} ({key}) and to {spec.name} ({use.key}): change one of them"
                )
            ports[use.port] = (spec.name, use.key)
