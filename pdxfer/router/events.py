"""What goes into RouterState.handle and what comes out: plain values, no behaviour."""

from typing import Literal

import msgspec

from pdxfer.router.settings import RouterSettings
from pdxfer.wire.manage import StoreOpUpdate
from pdxfer.wire.messages import FromMember, FromRouter, Role, Served


class Received(msgspec.Struct, frozen=True, gc=False):
    """A member's message. `route` is its connection: identity + ``#`` + random."""

    route: bytes
    message: FromMember
    wall: float
    """The router's wall clock at arrival."""


class Unreachable(msgspec.Struct, frozen=True):
    """A message could not be sent: that connection is gone."""

    route: bytes


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class SetDrain(msgspec.Struct, frozen=True):
    """An operator drains an engine, or takes it back."""

    engine_id: str
    on: bool


class Stop(msgspec.Struct, frozen=True):
    """The router is leaving: no new pairings, running ones may end."""


class SetRole(msgspec.Struct, frozen=True):
    """An operator has an engine that can do both do one thing, or both again."""

    engine_id: str
    role: Role


class SetCreditLimit(msgspec.Struct, frozen=True):
    """An operator bounds what is promised of an engine's blocks; None: no bound."""

    engine_id: str
    num_blocks: int | None


class SetPolicy(msgspec.Struct, frozen=True):
    """The settings from now on; only those in settings.LIVE differ."""

    settings: RouterSettings


class Tell(msgspec.Struct, frozen=True):
    """An operator's message to an engine's halves: all, or the workers alone. Unknown engines are not told."""

    engine_id: str
    message: FromRouter
    workers_only: bool = True


class TellProxy(msgspec.Struct, frozen=True):
    """An operator's message to a proxy. Unknown proxies are not told."""

    proxy_id: str
    message: FromRouter


Event = Received | Unreachable | Tick | SetDrain | Stop | SetRole | SetCreditLimit | SetPolicy | Tell | TellProxy


class Send(msgspec.Struct, frozen=True, gc=False):
    """One message to these connections."""

    routes: tuple[bytes, ...]
    message: FromRouter


class Log(msgspec.Struct, frozen=True):
    """A line for the operator."""

    level: Literal["info", "warning"]
    text: str


class Happened(msgspec.Struct, frozen=True):
    """Something for the controller's list of events. `kind` is from a small closed set."""

    kind: str
    detail: dict[str, str]


class Observed(msgspec.Struct, frozen=True, gc=False):
    """A member's report for the controller alone. `engine_id` is empty if a proxy sent it."""

    engine_id: str
    report: Served | StoreOpUpdate


Action = Send | Log | Happened | Observed
