"""What goes into RouterState.handle and what comes out: plain values, no behaviour."""

from typing import Literal

import msgspec

from pdxfer.wire.messages import FromMember, FromRouter


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


Event = Received | Unreachable | Tick | SetDrain | Stop


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


Action = Send | Log | Happened
