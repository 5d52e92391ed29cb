"""One prefill rank and one decode rank over real sockets, with codecs on the wire: what test_wire_staged.py drives."""

import threading
from collections.abc import Callable

import msgspec
import numpy as np

from pdxfer.codec.form import PackedForm
from pdxfer.codec.values import from_float
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.pack import Packing
from pdxfer.kv.runs import Runs
from pdxfer.memory.region import Region
from pdxfer.node.jobs import Report
from pdxfer.node.lane import Lane
from pdxfer.node.plan import SendPlan
from pdxfer.node.receiver import Receiver
from pdxfer.node.sender import Sender
from pdxfer.node.wire import Wire
from pdxfer.node.wire_settings import WireSettings
from pdxfer.transport.base import (
    Abort,
    Channel,
    Control,
    Credit,
    EndpointOptions,
    OutgoingUnit,
    PeerId,
    UnitFailed,
    UnitHeader,
)
from pdxfer.transport.tcp import TcpEndpoint
from pdxfer.wire.halves import Expect, Fenced, Landed, ToScheduler
from pdxfer.wire.messages import Grant

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, CHUNK_BLOCKS = 2, 32, 16, 2, 16, 2
PACKING = Packing(kind="plain", heads=HEADS, block_size=BLOCK_SIZE, head_dim=DIM, item_bytes=2)
P0 = PeerId(engine_id="p0", incarnation=1, rank=0)
D0 = PeerId(engine_id="d0", incarnation=1, rank=0)
SOURCE = [3, 9, 4, 11, 7, 2, 14, 6]
TARGET = [20, 1, 2, 30, 8, 13, 5, 26]
MARKS = {"model": "rig"}


def settings(codec: str = "lossless", **changes: object) -> WireSettings:
    base = {
        "codec": codec,
        "allow": (codec,) if codec != "auto" else ("lossless",),
        "forms": lambda num_layers: PackedForm(PACKING, "bfloat16", num_layers),
        "dtype": "bfloat16",
        "staging_bytes": 4 * CHUNK_BLOCKS * LAYERS * PACKING.block_bytes,
    }
    return WireSettings(**{**base, **changes})  # type: ignore[arg-type]


class Side:
    """A region of bfloat16 values and what stands around it."""

    def __init__(self, seed: int, wire: WireSettings, marks: dict[str, str]) -> None:
        values = np.random.default_rng(seed).standard_normal(LAYERS * BLOCKS * PACKING.block_bytes // 2)
        self.array = from_float(values.astype(np.float32), "bfloat16").reshape(LAYERS, BLOCKS, PACKING.block_bytes)
        self.region = Region(
            KvLayout(
                base=self.array.ctypes.data,
                num_bytes=self.array.nbytes,
                num_blocks=BLOCKS,
                block_bytes=PACKING.block_bytes,
                block_stride=PACKING.block_bytes,
                layer_offsets=tuple(layer * BLOCKS * PACKING.block_bytes for layer in range(LAYERS)),
                block_size=BLOCK_SIZE,
            )
        )
        self.wire = Wire(wire, self.region, marks, CHUNK_BLOCKS, SYSTEM_CLOCK)


class _PrefillSink:
    def __init__(self, rig: "Rig") -> None:
        self._rig = rig

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        return None

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        return False

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None: ...

    def control(self, peer: PeerId, control: Control) -> None:
        if isinstance(control, Credit):
            self._rig.note_credit(control)
        elif isinstance(control, Abort):
            self._rig.sender.abort(peer.engine_id, control.transfer_id, control.epoch, control.reason)
        elif isinstance(control, UnitFailed):
            self._rig.sender.hear(peer.engine_id, control)

    def lost(self, peer: PeerId, reason: str) -> None: ...


class _DecodeSink:
    def __init__(self, rig: "Rig") -> None:
        self._rig = rig

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        return self._rig.receiver.claim(peer, header, "tcp")

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        return self._rig.receiver.arrived(peer, header)

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        self._rig.receiver.failed(peer, header, reason)

    def control(self, peer: PeerId, control: Control) -> None:
        self._rig.receiver.control(peer, control)

    def lost(self, peer: PeerId, reason: str) -> None:
        self._rig.receiver.lost(peer, reason, "tcp")


class _Tampering:
    """A channel whose frames can be changed on their way."""

    def __init__(self, channel: Channel, rig: "Rig") -> None:
        self._channel, self._rig = channel, rig
        self.kind, self.peer = channel.kind, channel.peer

    def write(self, unit: OutgoingUnit) -> None:
        self._rig.sent.append(unit.header)
        self._channel.write(self._rig.tamper(unit))

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)


class Rig:
    """Both sides, connected."""

    def __init__(
        self,
        prefill: WireSettings | None = None,
        decode: WireSettings | None = None,
        marks: dict[str, str] = MARKS,
        drain_s: float = 10.0,
    ) -> None:
        """`drain_s`: long, so that a busy machine does not cut the connection; short where a fence is wanted."""
        self.facts: list[ToScheduler] = []
        self.settled: list[tuple[str, bool, str]] = []
        self.sent: list[UnitHeader] = []
        self.credits: list[Credit] = []
        self.changed = threading.Condition()
        self.tamper: Callable[[OutgoingUnit], OutgoingUnit] = lambda unit: unit
        self.pass_credits = True
        self.prefill = Side(1, prefill or settings(), MARKS)
        self.decode = Side(2, decode or settings(), marks)
        self.receiver = Receiver(
            0, self.decode.region, self._fact, SYSTEM_CLOCK, drain_s, lambda: [P0], self.decode.wire.staging
        )
        options = EndpointOptions()
        self.there = TcpEndpoint(options, D0, self.decode.region, _DecodeSink(self))
        self.here = TcpEndpoint(options, P0, self.prefill.region, _PrefillSink(self))
        for endpoint in (self.there, self.here):
            endpoint.admit([P0, D0], b"secret")
        self.receiver.start([self.there])
        self.sender = Sender(LAYERS, CHUNK_BLOCKS, self._lane, self._settle, 0, self.prefill.wire.codecs_of)
        self.wire_sender = self.prefill.wire.sender("d0")
        self._channel: _Tampering | None = None
        self.channel()

    def channel(self) -> Channel:
        """The open one, or a new one."""
        if self._channel is None or self._channel.dead:
            self._channel = _Tampering(self.connect(), self)
        return self._channel  # type: ignore[return-value]

    def reconnect(self) -> Channel:
        """Another one, used from now on; the one before stays open, and is returned."""
        before, self._channel = self.channel(), _Tampering(self.connect(), self)
        return before

    def connect(self) -> Channel:
        channel = self.here.connect(D0, self.there.address(), 5.0)
        channel.probe(30.0)  # as the pool does: until then decode may not know whom to tell of its slots
        return channel

    def _lane(self, engine_id: str, report: Callable[[Report], None]) -> Lane:
        return Lane(engine_id, self.prefill.region, self.channel, report, lambda c, r: None, 1, self.wire_sender)

    def note_credit(self, credit: Credit) -> None:
        if self.pass_credits:
            self.sender.hear("d0", credit)
        with self.changed:
            self.credits.append(credit)
            self.changed.notify_all()

    def _fact(self, fact: ToScheduler) -> None:
        with self.changed:
            self.facts.append(fact)
            self.changed.notify_all()

    def _settle(self, transfer_id: str, delivered: bool, reason: str) -> None:
        with self.changed:
            self.settled.append((transfer_id, delivered, reason))
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        """Also for what nobody tells us of: looked at often."""
        end = SYSTEM_CLOCK.now() + 60.0
        with self.changed:
            while not condition():
                assert SYSTEM_CLOCK.now() < end, (self.facts, self.settled, self.credits)
                self.changed.wait(0.02)

    def expect(self, transfer_id: str = "t", target: list[int] = TARGET, epoch: int = 1) -> None:
        self.receiver.expect(
            Expect(transfer_id=transfer_id, epoch=epoch, prefill_id="p0", first_block=0, block_ids=target)
        )

    def grant(self, transfer_id: str = "t", target: list[int] = TARGET, epoch: int = 1) -> None:
        self.sender.grant(
            Grant(
                transfer_id=transfer_id,
                epoch=epoch,
                decode_id="d0",
                decode_incarnation=1,
                first_block=0,
                block_ids=target,
                num_tokens=BLOCK_SIZE * len(target),
                token_digest=b"d",
            )
        )

    def prompt(
        self,
        transfer_id: str = "t",
        source: list[int] = SOURCE,
        tenant: str = "",
        left_s: float = 600.0,
        num_layers: int = LAYERS,
    ) -> None:
        """All of it in one step; its first `num_layers` layers are final."""
        plan = SendPlan(
            transfer_id=transfer_id,
            first_block=0,
            block_ids=tuple(source),
            num_ready=0,
            total_blocks=len(source),
            num_tokens=BLOCK_SIZE * len(source),
            token_digest=b"d",
            tenant=tenant,
            deadline=SYSTEM_CLOCK.now() + left_s,
        )
        self.sender.begin_step((plan,))
        self.sender.layers_done(0, num_layers)

    def run(self, transfer_id: str = "t", tenant: str = "", left_s: float = 600.0) -> ToScheduler:
        """One transfer, from grant to its end on decode; returns Landed or Fenced."""
        self.expect(transfer_id)
        if self.pass_credits:
            self.wait(lambda: any(c.transfer_id == transfer_id for c in self.credits))
        self.grant(transfer_id)
        self.prompt(transfer_id, tenant=tenant, left_s=left_s)
        self.wait(lambda: self.end_of(transfer_id) and any(s[0] == transfer_id for s in self.settled))
        end = self.end_of(transfer_id)
        assert end is not None
        return end

    def end_of(self, transfer_id: str) -> Landed | Fenced | None:
        ends = [f for f in self.facts if isinstance(f, Landed | Fenced) and f.transfer_id == transfer_id]
        assert len(ends) < 2, ends
        return ends[0] if ends else None

    @property
    def is_equal(self) -> bool:
        """The prompt's blocks hold the same bytes on both sides."""
        return bool((self.prefill.array[:, SOURCE] == self.decode.array[:, TARGET]).all())

    @property
    def frames(self) -> list[UnitHeader]:
        """Units that left as frames."""
        return [header for header in self.sent if header.frame_bytes]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.here.close()
        self.there.close()


def changed(unit: OutgoingUnit, frame: bytes, **fields: object) -> OutgoingUnit:
    """The same unit with another frame."""
    header = msgspec.structs.replace(unit.header, **fields)
    return msgspec.structs.replace(unit, header=header, frame=(frame,), source=unit.source)
