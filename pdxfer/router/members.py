"""Engines and proxies as the router knows them: their halves, what they told, whether they may be used.

An engine has joined when its scheduler half and all ranks said hello under one incarnation. Records only; who changes
them and what follows is state.py.
"""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pdxfer.core.ids import is_engine_id
from pdxfer.router.credits import Credit
from pdxfer.wire.messages import EngineRef, Heartbeat, Hello, PeerReady, Peers, Role, WorkerHello

_ROUTE = re.compile(rb"([^/#]{1,64})/([A-Za-z0-9._-]{1,64})#[^#]{1,64}")
_WORKER = re.compile(r"w(\d{1,4})")
PROXY = "proxy"
_CLOCK_BEATS = 60
"""Heartbeats whose smallest offset counts: enough for one that was not delayed, few enough to follow a clock that
steps."""


class Identity(NamedTuple):
    """Who a connection says it is: (engine_id, sched), (engine_id, w3) or (proxy, proxy_id)."""

    name: str
    part: str

    @property
    def is_proxy(self) -> bool:
        return self.name == PROXY

    @property
    def is_scheduler(self) -> bool:
        return self.part == "sched" and not self.is_proxy

    @property
    def rank(self) -> int | None:
        """Of a worker half."""
        match = _WORKER.fullmatch(self.part)
        return int(match[1]) if match and not self.is_proxy else None


def parse_route(route: bytes) -> Identity | None:
    """The identity in a connection's route, or None if it has none."""
    match = _ROUTE.fullmatch(route)
    if match is None or not match[1].isascii():
        return None
    name = match[1].decode()
    return Identity(name, match[2].decode()) if is_engine_id(name) else None


@dataclass(slots=True, kw_only=True)
class Link:
    """One connection of a member that said hello."""

    route: bytes
    last_seen: float
    beat: Heartbeat | None = None
    """The last one."""
    clock_offset: float | None = None
    """Router wall − member wall, smallest of the last heartbeats: the least delayed sample."""
    clock_samples: deque[float] = field(default_factory=lambda: deque(maxlen=_CLOCK_BEATS))

    def heard(self, beat: Heartbeat, now: float, wall: float) -> None:
        """A heartbeat arrived."""
        self.last_seen, self.beat = now, beat
        self.clock_samples.append(wall - beat.wall)
        self.clock_offset = min(self.clock_samples)


@dataclass(slots=True, kw_only=True)
class Worker:
    """One rank."""

    link: Link
    hello: WorkerHello
    ready: dict[str, PeerReady] = field(default_factory=dict)
    """By peer engine: the last word on the channel to its node of this rank."""
    told: Peers | None = None
    """What we sent it last."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine in one life."""

    engine_id: str
    incarnation: int
    hello: Hello | None = None
    sched: Link | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    credit: Credit = field(default_factory=lambda: Credit(0))
    outstanding_tokens: int = 0
    """Prompt tokens paired to it as prefill and not computed yet."""
    num_running: int = 0
    num_waiting: int = 0
    given_role: Role | None = None
    """An operator's choice for an engine that can do both."""
    is_joined: bool = False
    is_suspect: bool = False
    is_draining: bool = False

    @property
    def ref(self) -> EngineRef:
        """Where the proxy sends a leg."""
        assert self.hello is not None
        return EngineRef(engine_id=self.engine_id, url=self.hello.url)

    @property
    def is_usable(self) -> bool:
        """May take new requests."""
        return self.is_joined and not self.is_suspect and not self.is_draining

    @property
    def role(self) -> Role | None:
        """What it does now; None until its scheduler half said hello."""
        return self.given_role or (self.hello.role if self.hello is not None else None)

    @property
    def can_prefill(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def can_decode(self) -> bool:
        return self.role in ("decode", "both")

    @property
    def links(self) -> list[Link]:
        """Connections of all halves."""
        found = [worker.link for worker in self.workers.values()]
        return [self.sched, *found] if self.sched is not None else found

    @property
    def worker_routes(self) -> tuple[bytes, ...]:
        return tuple(worker.link.route for worker in self.workers.values())

    @property
    def missing(self) -> str:
        """What has not said hello yet; empty when all have."""
        if self.hello is None:
            return "its scheduler half"
        ranks = [rank for rank in range(self.hello.world_size) if rank not in self.workers]
        return f"worker ranks {ranks}" if ranks else ""

    def silent_s(self, now: float) -> float:
        """Silence of the half that was heard longest ago."""
        return max((now - link.last_seen for link in self.links), default=0.0)

    def serves(self, model: str) -> bool:
        """Whether clients may ask it for `model`; empty means any."""
        return self.hello is not None and (not model or model in self.hello.served_names)


@dataclass(slots=True, kw_only=True)
class Proxy:
    """One proxy connection."""

    proxy_id: str
    link: Link


def difference(prefill: Engine, decode: Engine) -> str:
    """Why two joined engines cannot exchange KV: the first field that differs and both values; empty if none does."""
    assert prefill.hello is not None and decode.hello is not None
    ours = dict(prefill.hello.fingerprint, world_size=str(prefill.hello.world_size))
    theirs = dict(decode.hello.fingerprint, world_size=str(decode.hello.world_size))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return (
                f"prefill {prefill.engine_id} and decode {decode.engine_id} cannot exchange KV: fingerprint field "
                f"{name} is {ours.get(name, '(absent)')!r} at {prefill.engine_id} and "
                f"{theirs.get(name, '(absent)')!r} at {decode.engine_id}; "
                "start both with the same model, weights and KV settings"
            )
    return ""
