"""Which blocks of the slab are free: extents of any length, best fit, never more than a few a value.

Pure, used by disk_slab.py on the event loop. No size classes, so nothing is stranded in a class nobody asks for; what a
value wastes is the rest of its last block.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

Extent = tuple[int, int]
"""(first block, number of blocks)."""


class Space:
    """Free extents of `num_blocks` blocks. Neighbours are always merged."""

    def __init__(self, num_blocks: int, used: Iterable[Extent] = ()) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = 0
        self._starts: list[int] = []
        self._counts: dict[int, int] = {}
        self._by_size: list[Extent] = []
        at = 0
        for start, count in sorted(used):
            assert start >= at, f"extent at {start} overlaps one that ends at {at}"
            self._add(at, start - at)
            at = start + count
        assert at <= num_blocks, (at, num_blocks)
        self._add(at, num_blocks - at)

    def __repr__(self) -> str:
        return f"<Space free={self.free_blocks}/{self.num_blocks} extents={len(self._starts)}>"

    @property
    def largest(self) -> int:
        """Blocks of the longest free extent."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, count: int, max_extents: int) -> tuple[Extent, ...] | None:
        """`count` blocks in at most `max_extents` extents: one that fits best, else the longest ones; None: no room."""
        if count > self.free_blocks:
            return None
        taken: list[Extent] = []
        while count:
            if len(taken) == max_extents:
                self.give(taken)
                return None
            fits = bisect_left(self._by_size, (count, 0))
            size, start = self._by_size[min(fits, len(self._by_size) - 1)]
            self._remove(start, size)
            part = min(size, count)
            self._add(start + part, size - part)
            taken.append((start, part))
            count -= part
        return tuple(taken)

    def give(self, extents: Iterable[Extent]) -> None:
        """Return what take gave."""
        for start, count in extents:
            self._merge(start, count)

    def grow(self, num_blocks: int) -> None:
        """The slab has become longer."""
        added = num_blocks - self.num_blocks
        assert added >= 0, (num_blocks, self.num_blocks)
        self.num_blocks = num_blocks
        self._merge(num_blocks - added, added)

    def _merge(self, start: int, count: int) -> None:
        if not count:
            return
        i = bisect_left(self._starts, start)
        if i < len(self._starts):
            following = self._starts[i]
            assert start + count <= following, f"block {following} is freed twice"
            if start + count == following:
                count += self._remove(following, self._counts[following])
        if i:
            before = self._starts[i - 1]
            length = self._counts[before]
            assert before + length <= start, f"block {start} is freed twice"
            if before + length == start:
                count += self._remove(before, length)
                start = before
        self._add(start, count)

    def _add(self, start: int, count: int) -> None:
        if count:
            insort(self._starts, start)
            insort(self._by_size, (count, start))
            self._counts[start] = count
            self.free_blocks += count

    def _remove(self, start: int, count: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (count, start))]
        del self._counts[start]
        self.free_blocks -= count
        return count
