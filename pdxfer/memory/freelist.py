"""Where pieces of an arena lie: a pure allocator over byte offsets, two-level segregated fit (TLSF).

Sizes are rounded up to one of eight classes a doubling, so a piece wastes less than an eighth of itself (from 32 KiB
on) and every free piece of a class fits every request of it: reserve and release are O(1). Neighbours that are free
are always one piece. No memory is touched here, no lock is taken: arena.py does both.
"""

GRANULE = 4096
"""Pieces begin and end at multiples of this: pages, as O_DIRECT and registration want them."""


def piece_bytes(num_bytes: int) -> int:
    """Size of the piece that holds `num_bytes`."""
    granules = max(1, -(-num_bytes // GRANULE))
    step = 1 << max(0, granules.bit_length() - 4)
    return -(-granules // step) * step * GRANULE


def _class_of(size: int) -> int:
    """Number of the largest class whose request size is at most `size`."""
    granules = size // GRANULE
    shift = max(0, granules.bit_length() - 4)
    return shift * 8 + (granules >> shift)


class FreeList:
    """Which bytes of `[0, num_bytes)` are free. Offsets and sizes are multiples of GRANULE."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes // GRANULE * GRANULE
        self.free_bytes = self.num_bytes
        self._sizes: dict[int, int] = {}
        """Free piece's offset → size."""
        self._ends: dict[int, int] = {}
        """Free piece's end → offset."""
        self._classes: dict[int, dict[int, None]] = {}
        """Class → offsets of its free pieces, in order of arrival."""
        self._present = 0
        """Bit per class that has pieces."""
        if self.num_bytes:
            self._insert(0, self.num_bytes)

    def reserve(self, size: int) -> int | None:
        """Offset of a piece of exactly `size` (from `piece_bytes`), or None: no free piece is long enough."""
        classes = self._present >> _class_of(size)
        if not classes:
            return None
        found = _class_of(size) + (classes & -classes).bit_length() - 1
        offset = next(iter(self._classes[found]))
        whole = self._remove(offset)
        if whole > size:
            self._insert(offset + size, whole - size)
        self.free_bytes -= size
        return offset

    def release(self, offset: int, size: int) -> None:
        """Give a piece back; joined with free neighbours."""
        self.free_bytes += size
        before = self._ends.get(offset)
        if before is not None:
            size += self._remove(before)
            offset = before
        if offset + size in self._sizes:
            size += self._remove(offset + size)
        self._insert(offset, size)

    def pieces(self) -> list[tuple[int, int]]:
        """All free pieces as (offset, size), by offset."""
        return sorted(self._sizes.items())

    def _insert(self, offset: int, size: int) -> None:
        self._sizes[offset] = size
        self._ends[offset + size] = offset
        number = _class_of(size)
        self._classes.setdefault(number, {})[offset] = None
        self._present |= 1 << number

    def _remove(self, offset: int) -> int:
        size = self._sizes.pop(offset)
        del self._ends[offset + size]
        number = _class_of(size)
        offsets = self._classes[number]
        del offsets[offset]
        if not offsets:
            self._present &= ~(1 << number)
        return size
