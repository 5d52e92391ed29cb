"""Who may fill which staging slot: credits of decode's ring, slot by slot. Pure bookkeeping, no memory, no threads.

    open ──▶ credits ──take──▶ slot in use ──release──▶ a credit again, for whoever has least
                 └── close ──▶ back to the ring; slots in use follow when their holder releases them

A slot has one holder from `take` to `release`: the thread that receives into it, then the one that decodes it. Nothing
else makes it free, so a slot that may still be written or read is never handed out again.
"""

from dataclasses import dataclass

Key = tuple[str, int]
"""(transfer, epoch)."""
MAX_SHARE = 8
"""Slots of one transfer: what is in the kernel's buffers, arrives, and is being decoded."""


@dataclass(slots=True)
class _Share:
    """What one transfer has of the ring."""

    credits: int = 0
    """Told to the sender and not used yet."""
    in_use: int = 0

    @property
    def size(self) -> int:
        return self.credits + self.in_use


class StagingRing:
    """Credits and slots. Not thread-safe: staging.py holds its lock."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._holders: dict[int, _Share] = {}
        """Slot in use → of whose share; the transfer may be over already."""
        self._shares: dict[Key, _Share] = {}

    def __repr__(self) -> str:
        return f"<StagingRing {len(self._free)}/{self.num_slots} free, {len(self._shares)} transfers>"

    def open(self, key: Key) -> dict[Key, int]:
        """A transfer begins; returns the credits to tell, by transfer."""
        self._shares.setdefault(key, _Share())
        return self._hand_out()

    def take(self, key: Key) -> int | None:
        """A frame comes: its slot, held until `release`. None: the sender has no credit for it."""
        share = self._shares.get(key)
        if share is None or share.credits == 0:
            return None
        share.credits, share.in_use = share.credits - 1, share.in_use + 1
        slot = self._free.pop()
        self._holders[slot] = share
        return slot

    def release(self, slot: int) -> dict[Key, int]:
        """Its holder is done with the slot; returns new credits to tell."""
        self._holders.pop(slot).in_use -= 1
        self._free.append(slot)
        return self._hand_out()

    def close(self, key: Key) -> dict[Key, int]:
        """The transfer is over: its credits go to the others. Idempotent."""
        self._shares.pop(key, None)
        return self._hand_out()

    def check(self) -> None:
        """Assert that every slot is free, or has one holder, and that no credit is without a slot."""
        assert sorted([*self._free, *self._holders]) == list(range(self.num_slots)), self
        assert 0 <= sum(share.credits for share in self._shares.values()) <= len(self._free), self
        for key, share in self._shares.items():
            assert share.in_use == sum(holder is share for holder in self._holders.values()), (self, key)

    def _hand_out(self) -> dict[Key, int]:
        """Credits for slots that nobody has a claim on, one by one to whoever has least."""
        spare = len(self._free) - sum(share.credits for share in self._shares.values())
        limit = min(MAX_SHARE, max(1, self.num_slots // max(1, len(self._shares))))
        given: dict[Key, int] = {}
        while spare > 0:
            key = min(self._shares, key=lambda k: self._shares[k].size, default=None)
            if key is None or self._shares[key].size >= limit:
                break
            self._shares[key].credits += 1
            given[key] = given.get(key, 0) + 1
            spare -= 1
        return given
