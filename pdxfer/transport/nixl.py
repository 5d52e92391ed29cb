"""NIXL over UCX (TCP, RDMA): the sender writes straight into the granted blocks and notifies. DRAM; VRAM is untested.

    NixlEndpoint ── Target × groups   our agents that peers write into (nixl_target.py)
                 └─ NixlChannel × peer   an agent each, to write with (nixl_channel.py)

One thread looks after all of them: NIXL has no way to wait for a notification, so it looks often while grants are out
or answers are due, and rarely (40 ms) otherwise. NIXL's own thread moves TCP bytes meanwhile, woken by its sockets.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError, PdxferError, ProtocolError
from pdxfer.kv.layout import KvLayout
from pdxfer.memory.region import Region
from pdxfer.transport import cma
from pdxfer.transport.admission import Admission, describe
from pdxfer.transport.base import Control, EndpointOptions, PeerId, Sink
from pdxfer.transport.nixl_agent import set_ucx_defaults, writer_executed
from pdxfer.transport.nixl_channel import NixlChannel
from pdxfer.transport.nixl_target import Target
from pdxfer.transport.pauses import sleep_precisely
from pdxfer.transport.stream import decode

log = logging.getLogger(__name__)

HOT_S, WARM_S, PARKED_S = 250e-6, 1e-3, 40e-3
"""Between two looks: just after something came, growing with the time since; while grants are out; otherwise. Looks
take the lock that NIXL's thread needs to move bytes: at 100 us they cost up to a tenth of the receiver's CPU."""
WRITING_S = 4e-3
"""While a channel of ours writes: all that can come is an Abort, and each look takes the interpreter and the agent's
lock from the thread that writes."""
STAY_HOT_S = 0.02
PING_S = 0.5
_encode = msgspec.msgpack.Encoder().encode


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sender needs to write to a node."""

    host: str
    layout: KvLayout
    agents: list[bytes]
    """Metadata of each group's agent; a sender uses the one its name falls on."""


_address_decoder = msgspec.msgpack.Decoder(NixlAddress)


def group_of(engine_id: str, num_groups: int) -> int:
    """Which of a receiver's agents this engine writes into: spread by name, the same on both sides."""
    return hashlib.blake2b(engine_id.encode(), digest_size=4).digest()[0] % num_groups


class NixlEndpoint:
    """See Endpoint."""

    kind = "nixl"
    writes_here = False

    def __init__(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> None:
        set_ucx_defaults(options)
        self.options, self.me, self.region, self.sink = options, me, region, sink
        self.admission = Admission()
        self._host = cma.host_id()
        self._lock = threading.Lock()
        self._targets: list[Target] = []
        self._channels: set[NixlChannel] = set()
        self._active = False
        self._stop = False
        self._wake = threading.Event()
        if region.layout.memory != "DRAM" and (allowed := writer_executed()):
            log.warning("UCX_TLS allows %s: bytes of a transfer that was given up can land later", ", ".join(allowed))
        try:
            for _ in range(options.max_fence_groups):
                self._targets.append(Target(me, region.layout, self.admission, sink))
        except PdxferError:
            for target in self._targets:
                target.close()
            raise
        self._thread = threading.Thread(target=self._run, name="pdxfer-nixl", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        peers_in = sum(len(t.sessions()) for t in self._targets)
        return f"<NixlEndpoint generation={self.generation} peers_in={peers_in} peers_out={len(self._channels)}>"

    @property
    def generation(self) -> int:
        """Grows with each agent that a fence has replaced."""
        return sum(target.generation for target in self._targets)

    def address(self) -> bytes:
        """See Endpoint."""
        agents = [b"" if t.agent.destroyed else t.agent.metadata for t in self._targets]
        return _encode(NixlAddress(host=self._host, layout=self.region.layout, agents=agents))

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None:
        """See Endpoint."""
        self.admission.set(peers, secret)
        for target in self._targets:
            target.cut_strangers()
        self._wake.set()

    def accepts(self, address: bytes) -> str:
        """See Endpoint."""
        try:
            there = self._read(address)
        except ProtocolError as error:
            return str(error)
        mine, theirs = self.region.layout, there.layout
        if (mine.num_layers, mine.block_bytes) != (theirs.num_layers, theirs.block_bytes):
            return (
                f"KV layouts differ: {theirs.num_layers} layers x {theirs.block_bytes} bytes a block there, "
                f"{mine.num_layers} x {mine.block_bytes} here"
            )
        if there.host == self._host and mine.memory == "DRAM" and (allowed := writer_executed()):
            return f"UCX_TLS allows {', '.join(allowed)}, which cannot be fenced on one host: unset UCX_TLS"
        if not there.agents[self._group(len(there.agents))]:
            return "the peer has lost its NIXL agent"
        return ""

    def connect(self, peer: PeerId, address: bytes, timeout_s: float) -> NixlChannel:
        """See Endpoint."""
        there = self._read(address)
        if reason := self.accepts(address):
            raise ChannelError(f"nixl to {describe(peer)}: {reason}")
        secret = self.admission.secret_for(peer, timeout_s)
        metadata = there.agents[self._group(len(there.agents))]
        layouts = (self.region.layout, there.layout)
        try:
            channel = NixlChannel(self.options, self.me, peer, layouts, metadata, self.sink, self._forget)
            try:
                self._remember(channel)
                channel.enter(secret, timeout_s)
            except PdxferError:
                channel.close()
                raise
        except PdxferError as error:
            raise ChannelError(f"nixl to {describe(peer)}: {error}") from error
        return channel

    def connections(self, peer: PeerId) -> frozenset[object]:
        """See Endpoint."""
        return frozenset(one for target in self._targets for one in target.connections(peer))

    def tell(self, peer: PeerId, control: Control) -> None:
        """See Endpoint."""
        if not any([target.tell(peer, control) for target in self._targets]):
            raise ChannelError(f"{describe(peer)} has no nixl channel to this node")

    def fence(self, peer: PeerId) -> None:
        """Replaces the agent of the peer's group, session or not; our address changes."""
        self._targets[group_of(peer.engine_id, len(self._targets))].renew(f"fenced because of {describe(peer)}")

    def attend(self, active: bool) -> None:
        """See Endpoint."""
        self._active = active
        for target in self._targets:
            target.active = active
        self._wake.set()

    def close(self) -> None:
        """See Endpoint."""
        with self._lock:
            if self._stop:
                return
            self._stop = True
            channels = list(self._channels)
        self.admission.close()
        self._wake.set()
        for channel in channels:
            channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(self.options.connect_timeout_s)
        for target in self._targets:
            target.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _read(self, address: bytes) -> NixlAddress:
        there = decode(address, _address_decoder)
        try:
            there.layout.check()
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if not there.agents:
            raise ProtocolError("nixl address without agents")
        return there

    def _group(self, num_groups: int) -> int:
        return group_of(self.me.engine_id, num_groups)

    def _remember(self, channel: NixlChannel) -> None:
        with self._lock:
            if self._stop:
                raise ChannelError("this node's nixl endpoint is closed")
            self._channels.add(channel)
        self._wake.set()

    def _forget(self, channel: NixlChannel) -> None:
        with self._lock:
            self._channels.discard(channel)

    def _run(self) -> None:
        """Look at everybody, then sleep for as long as is safe."""
        unpin_current_thread()
        sleep_precisely()
        now = SYSTEM_CLOCK.now()
        came_at, next_ping, next_sweep = now, now + PING_S, now
        while not self._stop:
            now = SYSTEM_CLOCK.now()
            with self._lock:
                channels = list(self._channels)
            sweep = now >= next_sweep
            if sweep:
                next_sweep = now + PARKED_S
            if self._look(channels, sweep):
                came_at = now
            if now >= next_ping:
                next_ping = now + PING_S
                self._ping(channels)
            is_hot = now - came_at < STAY_HOT_S
            if is_hot or self._active or any(channel.entering for channel in channels):
                pause = min(max((now - came_at) / 8, HOT_S), WARM_S)
            else:
                pause = WRITING_S if any(channel.writing for channel in channels) else PARKED_S
            self._wake.wait(pause)
            self._wake.clear()

    def _look(self, channels: list[NixlChannel], sweep: bool) -> bool:
        """Groups without a session can only get a hello; they are looked at in sweeps."""
        came = False
        for target in self._targets:
            if sweep or target.sessions():
                came = _safely(target.poll) or came
        for channel in channels:
            came = _safely(channel.look) or came
        return came

    def _ping(self, channels: list[NixlChannel]) -> None:
        for target in self._targets:
            if self._active:
                _safely(target.ping)
        for channel in channels:
            _safely(channel.ping)


def _safely(act: Callable[[], object]) -> bool:
    """A bug of the sink must not end the only thread that looks, nor keep it from the others."""
    try:
        return bool(act())
    except Exception:
        log.exception("nixl: an arrival failed: please report this")
        return False
