"""Config and machine → where each engine goes: id, port, cores, GPUs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdxfer.config.schema import Config, EnginePlace
from pdxfer.core.errors import ConfigError
from pdxfer.core.ids import is_engine_id
from pdxfer.launcher.machine import Machine

EngineRole = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine with everything about its place decided."""

    engine_id: str
    role: EngineRole
    port: int
    port_key: str
    cpus: str
    gpus: tuple[int, ...]


def place_engines(config: Config, machine: Machine) -> list[EnginePlan]:
    """Id, port, cores and GPUs of every engine of the topology, prefill first."""
    listed = [(role, i, p) for role in ("prefill", "decode") for i, p in enumerate(_places(config, role))]
    shares = _shares(machine.cpus, sum(1 for _, _, place in listed if place.cpus == ""))
    free_gpus = [gpu for gpu in machine.gpus if not any(gpu in place.gpus for _, _, place in listed)]
    engines = []
    for role, index, place in listed:
        gpus = tuple(place.gpus) or _take_gpu(free_gpus, machine, role, index)
        cpus = str(place.cpus) if place.cpus != "" else shares.pop(0)
        engines.append(
            EnginePlan(
                engine_id=_checked_id(place.id or f"{role[0]}{index}"),
                role="prefill" if role == "prefill" else "decode",
                port=place.port or _base_port(config, role) + index,
                port_key=_port_key(place, role, index),
                cpus="" if gpus and place.cpus == "" else cpus,
                gpus=gpus,
            )
        )
    return engines


def place_one(config: Config, machine: Machine, role: EngineRole, engine_id: str, port: int) -> EnginePlan:
    """An engine that runs alone here: the place listed under its id, else the first of its side."""
    side = "prefill" if role == "prefill" else "decode"
    places = _places(config, side)
    index = next((i for i, place in enumerate(places) if place.id and place.id == engine_id), 0)
    place = places[index] if places else EnginePlace()
    key = "--port" if port else _port_key(place, side, index)
    port = port or place.port or _base_port(config, side) + index
    return EnginePlan(
        engine_id=_checked_id(engine_id or place.id or f"{role}-{machine.hostname}-{port}"),
        role=role,
        port=port,
        port_key=key,
        cpus=str(place.cpus),
        gpus=tuple(place.gpus),
    )


def _places(config: Config, role: str) -> Sequence[EnginePlace]:
    side = config.topology.prefill if role == "prefill" else config.topology.decode
    return [EnginePlace() for _ in range(side)] if isinstance(side, int) else side


def _base_port(config: Config, role: str) -> int:
    return config.topology.prefill_port if role == "prefill" else config.topology.decode_port


def _port_key(place: EnginePlace, role: str, index: int) -> str:
    return f"topology.{role}[{index}].port" if place.port else f"topology.{role}_port"


def _checked_id(engine_id: str) -> str:
    if not is_engine_id(engine_id):
        raise ConfigError(f"engine id {engine_id!r}: use letters, digits, '.', '_' and '-', at most 64")
    return engine_id


def _shares(cpus: tuple[int, ...], num_engines: int) -> list[str]:
    """Equal runs of cores; with fewer cores than engines they are shared."""
    if not cpus or not num_engines:
        return [""] * num_engines
    each = max(1, len(cpus) // num_engines)
    starts = [i * each % len(cpus) for i in range(num_engines)]
    return [",".join(map(str, cpus[start : start + each])) for start in starts]


def _take_gpu(free: list[int], machine: Machine, role: str, index: int) -> tuple[int, ...]:
    if not machine.gpus:
        return ()
    if not free:
        raise ConfigError(
            f"no GPU is left for topology.{role}[{index}]: this machine has {len(machine.gpus)}. Give engines the same "
            "one with `gpus: [0]` and engine.gpu_memory_fraction, as configs/gpu-1p1d-one-gpu.yaml does"
        )
    return (free.pop(0),)
