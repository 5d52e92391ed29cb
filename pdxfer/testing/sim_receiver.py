"""The simulated worker of a decode engine: verifies units as they arrive, drains or fences what is revoked.

The same rules as node.receiver, which has threads. Facts go to the scheduler half in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdxfer.testing.sim_engine import SimChannel, SimEngine, Write
from pdxfer.wire.halves import Fenced, Generation, Landed

DRAIN_S = 0.2
Key = tuple[str, int]


@dataclass(slots=True)
class Incoming:
    """One grant that is out."""

    channel: SimChannel
    block_ids: list[int]
    landed: set[int] = field(default_factory=set)
    revoked: str = ""

    @property
    def num_valid(self) -> int:
        """Good blocks from the start."""
        return next((i for i in range(len(self.block_ids)) if i not in self.landed), len(self.block_ids))


class SimReceiver:
    """Of one life of one engine."""

    def __init__(self, engine: SimEngine, report: Callable[[Landed | Fenced | Generation], None]) -> None:
        self._engine, self._report = engine, report
        self.incoming: dict[Key, Incoming] = {}
        self.generation = 0

    def expect(self, key: Key, channel: SimChannel, block_ids: list[int]) -> None:
        """These blocks may be filled."""
        self.incoming[key] = Incoming(channel, block_ids)

    def arrived(self, write: Write) -> None:
        """A unit's notice: check the bytes, count them."""
        key = (write.transfer_id, write.epoch)
        incoming = self.incoming.get(key)
        if incoming is None or incoming.revoked:
            return
        if not self._verify(write):
            self.revoke(key, "digest mismatch")
            return
        incoming.landed.add(write.index)
        if incoming.num_valid == len(incoming.block_ids):
            del self.incoming[key]
            num = len(incoming.block_ids)
            self._report(
                Landed(
                    rank=0, transfer_id=key[0], epoch=key[1], num_units=num, num_bytes=num, channel="nixl", wall=0.0
                )
            )  # fmt: skip

    def _verify(self, write: Write) -> bool:
        return self._engine.memory.get(write.target) == write.digest

    def revoke(self, key: Key, reason: str) -> None:
        """Take the grant back; Fenced follows."""
        incoming = self.incoming.get(key)
        if incoming is None or incoming.revoked:
            return
        self._take_back(incoming, reason)
        channel = incoming.channel
        if channel.tell(channel.prefill, channel.prefill.aborted, channel, *key):  # type: ignore[attr-defined]
            self._engine.world.at(DRAIN_S, self._engine, self.drain_deadline, key)
        else:
            self.fenced(key)

    def drained(self, transfer_id: str, epoch: int) -> None:
        """Prefill writes no more of it."""
        incoming = self.incoming.get((transfer_id, epoch))
        if incoming is not None and incoming.revoked:
            self.fenced((transfer_id, epoch))

    def drain_deadline(self, key: Key) -> None:
        """No answer: fence first, report second."""
        incoming = self.incoming.get(key)
        if incoming is not None:
            self.fence(incoming.channel)
            self.fenced(key)

    def fence(self, channel: SimChannel) -> None:
        """No late byte from now on."""
        self._engine.world.note(f"{self._engine.name}: fences {channel.prefill.name}")
        channel.fence()

    def lost(self, channel: SimChannel) -> None:
        """The connection is closed: what came over it and is not complete is over."""
        for key, incoming in list(self.incoming.items()):
            if incoming.channel is channel:
                if not incoming.revoked:
                    self._take_back(incoming, "connection lost")
                self.fenced(key)

    def _take_back(self, incoming: Incoming, reason: str) -> None:
        incoming.revoked = reason
        self.generation += 1
        self._report(Generation(rank=0, number=self.generation))

    def fenced(self, key: Key) -> None:
        """Nothing can land any more."""
        incoming = self.incoming.pop(key)
        self._report(
            Fenced(
                rank=0, transfer_id=key[0], epoch=key[1], num_valid=incoming.num_valid, reason=incoming.revoked
            )
        )  # fmt: skip
