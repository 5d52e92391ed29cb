"""Counted pieces of one memory segment: the DRAM that tiers keep values in and transports register whole.

`reserve` hands out a Piece with one reference; whoever else looks at its bytes holds another; the last drop makes the
room free again and rings `on_free`. Never waits and never evicts: that is the tier's business (store/dram.py).
"""

import threading
from collections.abc import Callable

from pdxfer.memory.freelist import FreeList, piece_bytes
from pdxfer.memory.segment import Segment


class Piece:
    """Bytes `[offset, offset + num_bytes)` of the arena's segment. `hold` and `drop` on any thread."""

    __slots__ = ("_arena", "num_bytes", "offset", "owner", "refs", "size")

    def __init__(self, arena: "Arena", offset: int, size: int, num_bytes: int, owner: str) -> None:
        self._arena = arena
        self.offset = offset
        self.size = size
        """Bytes it occupies, its waste included."""
        self.num_bytes = num_bytes
        self.owner = owner
        self.refs = 1

    def __repr__(self) -> str:
        return f"<Piece {self.num_bytes} B at {self.offset} refs={self.refs}>"

    @property
    def view(self) -> memoryview:
        """The bytes, writable; valid while a reference is held."""
        return self._arena.segment.view[self.offset : self.offset + self.num_bytes]

    def hold(self) -> None:
        """One more reference."""
        self._arena._hold(self)

    def drop(self) -> None:
        """One reference less; with the last one the room is free."""
        self._arena._drop(self)


class Arena:
    """All of one segment, in pieces. `on_free` is called after room became free, on the thread that freed it."""

    def __init__(self, segment: Segment, on_free: Callable[[], None] = lambda: None) -> None:
        self.segment = segment
        self.on_free = on_free
        self._lock = threading.Lock()
        self._free = FreeList(segment.num_bytes)
        self._pieces: dict[int, Piece] = {}
        self._owned: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Arena {self.used_bytes} of {self.capacity_bytes} B in {len(self._pieces)} pieces>"

    @property
    def capacity_bytes(self) -> int:
        """Of the segment, whole granules."""
        return self._free.num_bytes

    @property
    def used_bytes(self) -> int:
        """In pieces, their waste included."""
        return self._free.num_bytes - self._free.free_bytes

    @property
    def num_pieces(self) -> int:
        """Pieces that are held."""
        return len(self._pieces)

    def used_by(self, owner: str) -> int:
        """Bytes in pieces of this owner."""
        return self._owned.get(owner, 0)

    def reserve(self, num_bytes: int, owner: str = "") -> Piece | None:
        """A piece with one reference, or None: no free run of bytes is long enough."""
        size = piece_bytes(num_bytes)
        with self._lock:
            offset = self._free.reserve(size)
            if offset is None:
                return None
            piece = Piece(self, offset, size, num_bytes, owner)
            self._pieces[offset] = piece
            self._owned[owner] = self._owned.get(owner, 0) + size
            return piece

    def check(self) -> None:
        """Integrity: pieces and free pieces tile the segment, nobody's reference is lost. AssertionError if not."""
        with self._lock:
            free, used = self._free.pieces(), [(p.offset, p.size) for p in self._pieces.values()]
            at = 0
            for offset, size in sorted(free + used):
                assert offset == at, f"gap or overlap at {at}: next piece at {offset}"
                at = offset + size
            assert at == self.capacity_bytes, (at, self.capacity_bytes)
            ends = {offset + size for offset, size in free}
            assert not any(offset in ends for offset, _ in free), "free neighbours were not joined"
            assert all(p.refs > 0 for p in self._pieces.values())
            assert sum(size for _, size in used) == self.used_bytes == sum(self._owned.values())

    def _hold(self, piece: Piece) -> None:
        with self._lock:
            assert piece.refs > 0, f"{piece!r} is gone"
            piece.refs += 1

    def _drop(self, piece: Piece) -> None:
        with self._lock:
            assert piece.refs > 0, f"{piece!r} is gone"
            piece.refs -= 1
            if piece.refs:
                return
            del self._pieces[piece.offset]
            self._free.release(piece.offset, piece.size)
            left = self._owned[piece.owner] - piece.size
            if left:
                self._owned[piece.owner] = left
            else:
                del self._owned[piece.owner]
        self.on_free()
