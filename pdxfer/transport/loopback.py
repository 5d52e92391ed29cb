"""Endpoints inside one process, joined by a LoopbackNet that the test makes: nothing runs by itself.

A unit is copied, and the sink called, on the thread that writes it or that releases it from the net's hold, so a test
decides every order. With `one_sided` the bytes land without asking the receiver, as over nixl.
"""

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdxfer.core.errors import ChannelError
from pdxfer.kv.runs import Runs, block_runs, pair_runs
from pdxfer.memory.region import Region
from pdxfer.transport.admission import Admission, describe
from pdxfer.transport.base import Control, EndpointOptions, OutgoingUnit, PeerId, Sink, UnitResult


class Fate(enum.Enum):
    """What the net does with one message."""

    DELIVER = "deliver"
    DROP = "drop"
    """Lost without a trace; the sender believes it was written."""
    CORRUPT = "corrupt"
    """A unit's first byte arrives changed."""
    HOLD = "hold"
    """Kept until the test releases it (delay, reordering)."""


@dataclass(frozen=True, slots=True)
class Message:
    """One unit or control under way from a channel to its receiver."""

    channel: "LoopbackChannel"
    body: OutgoingUnit | Control


class LoopbackNet:
    """Knows the endpoints of one test and decides the fate of what they send."""

    def __init__(self, fate: Callable[[Message], Fate] = lambda _: Fate.DELIVER, one_sided: bool = False) -> None:
        self.fate, self.one_sided = fate, one_sided
        self.held: list[Message] = []
        self._lock = threading.Lock()
        self._endpoints: dict[PeerId, LoopbackEndpoint] = {}

    def factory(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> "LoopbackEndpoint":
        """An EndpointFactory for this net."""
        endpoint = LoopbackEndpoint(self, options, me, region, sink)
        with self._lock:
            self._endpoints[me] = endpoint
        return endpoint

    def find(self, peer: PeerId) -> "LoopbackEndpoint":
        """Raises ChannelError if there is no such endpoint (any more)."""
        with self._lock:
            endpoint = self._endpoints.get(peer)
        if endpoint is None:
            raise ChannelError(f"{describe(peer)} is not in this loopback net")
        return endpoint

    def remove(self, endpoint: "LoopbackEndpoint") -> None:
        """The endpoint is closed."""
        with self._lock:
            self._endpoints.pop(endpoint.me, None)

    def send(self, message: Message) -> None:
        """Deliver, drop or hold. A control never overtakes what its channel has in hold."""
        fate = self.fate(message)
        with self._lock:
            behind = not isinstance(message.body, OutgoingUnit) and any(m.channel is message.channel for m in self.held)
            if fate is Fate.HOLD or behind:
                self.held.append(message)
                return
        self.deliver(message, fate)

    def release(self, index: int = 0) -> None:
        """Deliver one held message; 0 is the oldest."""
        with self._lock:
            message = self.held.pop(index)
        self.deliver(message, Fate.DELIVER)

    def forget(self, channel: "LoopbackChannel") -> None:
        """Throw away what this channel has in hold."""
        with self._lock:
            self.held = [m for m in self.held if m.channel is not channel]

    def deliver(self, message: Message, fate: Fate) -> None:
        """Hand the message to its receiver."""
        channel, body = message.channel, message.body
        target = self.find(channel.peer)
        if not isinstance(body, OutgoingUnit):
            if fate is not Fate.DROP:
                target.sink.control(channel.endpoint.me, body)
            return
        error = "" if fate is Fate.DROP else target.land(channel.endpoint, body, corrupt=fate is Fate.CORRUPT)
        channel.finished(UnitResult(header=body.header, error=error))


class LoopbackEndpoint:
    """See Endpoint."""

    kind = "loopback"

    def __init__(self, net: LoopbackNet, options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> None:
        self.net, self.options, self.me, self.region, self.sink = net, options, me, region, sink
        self.writes_here = not net.one_sided
        self.admission = Admission()
        self.active = False
        self._lock = threading.Lock()
        self._landing = threading.Lock()
        self._incoming: list[LoopbackChannel] = []
        self._outgoing: list[LoopbackChannel] = []

    def __repr__(self) -> str:
        return f"<LoopbackEndpoint of={self.me.engine_id} peers_in={len(self._incoming)}>"

    @property
    def generation(self) -> int:
        """Constant."""
        return 0

    def address(self) -> bytes:
        """Peers are found by their id."""
        return b"loopback"

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None:
        """See Endpoint."""
        self.admission.set(peers, secret)
        for channel in list(self._incoming):
            if not self.admission.admits(channel.endpoint.me):
                self.cut(channel, "not admitted any more")

    def accepts(self, address: bytes) -> str:
        """See Endpoint."""
        return "" if address == b"loopback" else "not a loopback address"

    def connect(self, peer: PeerId, address: bytes, timeout_s: float) -> "LoopbackChannel":
        """See Endpoint."""
        target = self.net.find(peer)
        if self.admission.secret_for(peer, timeout_s) != target.admission.secret_for(self.me, timeout_s):
            target.admission.refused["wrong proof"] += 1
            raise ChannelError(f"{describe(peer)} refused: wrong proof")
        channel = LoopbackChannel(self, peer)
        with self._lock:
            self._outgoing.append(channel)
        with target._lock:
            target._incoming.append(channel)
        channel.generation = target.sink.generation if self.net.one_sided else 0
        return channel

    def connections(self, peer: PeerId) -> frozenset[object]:
        """See Endpoint."""
        return frozenset(c for c in list(self._incoming) if c.endpoint.me == peer and not c.dead)

    def tell(self, peer: PeerId, control: Control) -> None:
        """See Endpoint."""
        for channel in list(self._incoming):
            if channel.endpoint.me == peer and not channel.dead:
                channel.endpoint.sink.control(self.me, control)
                return
        raise ChannelError(f"{describe(peer)} has no loopback channel to this node")

    def fence(self, peer: PeerId) -> None:
        """See Endpoint."""
        for channel in list(self._incoming):
            if channel.endpoint.me == peer:
                self.cut(channel, "fenced")
        with self._landing:
            pass

    def attend(self, active: bool) -> None:
        """Recorded, for tests."""
        self.active = active

    def close(self) -> None:
        """See Endpoint."""
        self.net.remove(self)
        self.admission.close()
        for channel in list(self._outgoing):
            channel.close()
        for channel in list(self._incoming):
            self.cut(channel, "endpoint closed")

    # ---- used by the net and by channels ---------------------------------------------------------------------------

    def cut(self, channel: "LoopbackChannel", reason: str) -> None:
        """End an incoming channel."""
        with self._lock:
            if channel not in self._incoming:
                return
            self._incoming.remove(channel)
        channel.die(reason)
        self.net.forget(channel)
        self.sink.lost(channel.endpoint.me, reason)

    def left(self, channel: "LoopbackChannel") -> None:
        """An outgoing channel was closed."""
        with self._lock:
            if channel in self._outgoing:
                self._outgoing.remove(channel)

    def land(self, source: "LoopbackEndpoint", unit: OutgoingUnit, corrupt: bool) -> str:
        """Copy a unit into our region and tell the sink; returns why not, for the sender."""
        header = unit.header
        if self.net.one_sided:
            layers = (header.first_layer, header.num_layers)
            self._copy(source, unit, block_runs(self.region.layout, unit.target_blocks, *layers), corrupt)
        runs = self.sink.claim(source.me, header)
        if runs is None:
            return ""
        if not self.net.one_sided:
            self._copy(source, unit, runs, corrupt)
        return "" if self.sink.arrived(source.me, header) else "digest mismatch"

    def _copy(self, source: "LoopbackEndpoint", unit: OutgoingUnit, target: Runs, corrupt: bool) -> None:
        with self._landing:
            from_runs, to_runs = pair_runs(unit.source, target)
            views = self.region.views(to_runs)
            for to_view, from_view in zip(views, source.region.views(from_runs), strict=True):
                to_view[:] = from_view
            if corrupt:
                views[0][0] ^= 0xFF


class LoopbackChannel:
    """See Channel."""

    kind = "loopback"

    def __init__(self, endpoint: LoopbackEndpoint, peer: PeerId) -> None:
        self.endpoint, self.peer = endpoint, peer
        self.generation = 0
        self._dead = ""
        self._results: list[UnitResult] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<LoopbackChannel to={self.peer.engine_id} {self._dead or 'open'}>"

    @property
    def dead(self) -> str:
        """See Channel."""
        return self._dead

    def write(self, unit: OutgoingUnit) -> None:
        """See Channel."""
        self._check()
        self.endpoint.net.send(Message(self, unit))

    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        """See Channel."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._dead, timeout_s)
            self._check()
            results, self._results = self._results, []
            return results

    def tell(self, control: Control) -> None:
        """See Channel."""
        self._check()
        self.endpoint.net.send(Message(self, control))

    def probe(self, timeout_s: float) -> None:
        """See Channel."""
        self._check()
        self.endpoint.net.find(self.peer)

    def close(self) -> None:
        """See Channel."""
        self.die("closed here")
        self.endpoint.left(self)
        try:
            self.endpoint.net.find(self.peer).cut(self, "the peer closed its channel")
        except ChannelError:
            pass  # it went first

    def finished(self, result: UnitResult) -> None:
        """The source of a unit is free again."""
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()

    def die(self, reason: str) -> None:
        """Nothing leaves any more."""
        with self._changed:
            self._dead = self._dead or f"loopback channel to {describe(self.peer)}: {reason}"
            self._changed.notify_all()

    def _check(self) -> None:
        if self._dead:
            raise ChannelError(self._dead)
