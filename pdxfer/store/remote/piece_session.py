"""A Session for servers that keep small values by name: a value as pieces (pieces.py), pipelined, all or nothing.

    head    {prefix}{<key>}               piece 0, written last and only once: it alone makes the value visible
    piece i {prefix}{<key>}:<put>:<i>

All of them expire soon unless they are kept, which is asked for in one message behind the last byte: a writer that dies
leaves nothing.

The commands are a PieceWire's (redis_wire.py, memcached_wire.py). The braces are Redis's hash tag: all pieces of a
value live on one server of a cluster. Copies: none of ours.
"""

import heapq
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from pdxfer.store.base import KEY_BYTES, Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.remote import pieces
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.pieces import HEADER_BYTES, Piece, PieceError
from pdxfer.store.remote.session import Lend
from pdxfer.store.remote.stream import Stream

GARBAGE = -1
"""In place of a value's length: something else lies under its name."""


class PieceWire(Protocol):
    """One connection's commands. `send_*` and `read_*` are halves of a question, so that questions can be pipelined;
    errors the server reports are returned by `read_stored`, raised by the others when the conversation is in step."""

    stream: Stream
    room: int
    """Payload bytes of one piece."""

    def ping(self, end: float) -> None:
        """Ask for a sign of life."""
        ...

    def send_sizes(self, names: Sequence[bytes], end: float) -> None:
        """Ask for the length of the values with these heads."""
        ...

    def read_size(self, key: bytes, end: float) -> int | None:
        """One length, or GARBAGE; None: absent."""
        ...

    def headers(self, names: Sequence[bytes], end: float) -> list[bytes | None]:
        """The first HEADER_BYTES of what lies there."""
        ...

    def send_store(
        self, name: bytes, body: Sequence[Buffer], value_bytes: int, end: float, *, head: bool, lasts: bool
    ) -> None:
        """A piece; a head: only if there is none. It expires soon unless it `lasts`, or is kept."""
        ...

    def read_stored(self, end: float) -> bool | ServerError:
        """False: there is one."""
        ...

    def send_keep(self, names: Sequence[bytes], end: float) -> None:
        """These are to stay as long as the value."""
        ...

    def read_kept(self, end: float) -> bool:
        """False: it is gone already."""
        ...

    def send_fetch(self, names: Sequence[bytes], end: float) -> None:
        """Ask for whole bodies."""
        ...

    def read_length(self, end: float) -> int | None:
        """Length of the next body, which then arrives on the stream; None: absent."""
        ...

    def read_tail(self, end: float) -> None:
        """What follows a body."""
        ...

    def drop(self, names: Sequence[bytes], end: float) -> list[bool]:
        """Remove; which were there."""
        ...

    def names(self, end: float) -> Iterable[bytes]:
        """Names on the server that may be heads."""
        ...


class PieceSession:
    """Implements Session."""

    def __init__(self, wire: PieceWire, prefix: bytes) -> None:
        self._wire, self._prefix = wire, prefix
        self._stream = wire.stream

    def ping(self, end: float) -> None:
        """A sign of life."""
        self._wire.ping(end)

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """In one round trip."""
        self._wire.send_sizes([self._head(key) for key in keys], end)
        sizes = [self._wire.read_size(key, end) for key in keys]
        return [
            Entry(key=key, num_bytes=size) if size is not None and size != GARBAGE else None
            for key, size in zip(keys, sizes, strict=True)
        ]

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """The head's header says how long the value is; then the other pieces are asked for while the head arrives."""
        self._wire.send_fetch([self._head(key)], end)
        length = self._wire.read_length(end)
        if length is None:
            return None
        try:
            head = self._read_header(length, key, end)
            buffer = self._lend(lend, head, end)
            try:
                self._receive(key, head, buffer.view, end)
            except BaseException:
                buffer.give_back()
                raise
            return buffer
        except PieceError as error:
            self._wire.drop([self._head(key)], end)  # else nobody could store the value again
            raise ServerError(Reason.DAMAGED, f"value {key.hex()[:12]}: {error}", clean=True) from error

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """One pipeline: is it there? - pieces, head, both are to stay. The server does them in this order: the head
        comes after all pieces, and if the rest does not arrive, everything expires. A head that is kept and misses a
        piece is dropped by who reads it; a piece that is kept without a head nobody would find: so the head is kept
        first. The first answer is waited for before anything large goes."""
        name, put, payloads = self._head(key), secrets.token_bytes(8), pieces.split(parts, self._wire.room)
        count = len(payloads)
        if count > pieces.MAX_PIECES:
            return Outcome.TOO_LARGE
        rest = [self._piece(key, put, index) for index in range(1, count)]

        def seal(index: int) -> bytes:
            return pieces.seal(key, put, index, count, num_bytes, payloads[index])

        self._wire.send_sizes([name], end)
        known = self._wire.read_size(key, end)
        if known == GARBAGE:
            self._wire.drop([name], end)
        elif known is not None:
            return Outcome.ALREADY
        for index, to in enumerate(rest, 1):
            self._wire.send_store(to, [seal(index), *payloads[index]], num_bytes, end, head=False, lasts=False)
        self._wire.send_store(name, [seal(0), *payloads[0]], num_bytes, end, head=True, lasts=not rest)
        if rest:
            self._wire.send_keep([name, *rest], end)
        return self._read_written(name, rest, end)

    def _read_written(self, name: bytes, rest: list[bytes], end: float) -> Outcome:
        """The answers of `write`; whatever is there of a value that is not whole is dropped."""
        answers = [self._wire.read_stored(end) for _ in rest]
        stored = self._wire.read_stored(end)
        head_kept = self._wire.read_kept(end) if rest else True
        kept = [self._wire.read_kept(end) for _ in rest]
        if stored is True and head_kept and all(kept):
            return Outcome.STORED
        dropped = [*rest, name] if stored is True and head_kept else rest
        if dropped:
            self._wire.drop(dropped, end)
        for answer in (*answers, stored):
            if isinstance(answer, ServerError):
                raise answer
        if stored is not True:
            return Outcome.ALREADY
        return Outcome.FULL if head_kept else Outcome.STORED  # without its head: somebody has deleted it since

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """Heads first: from then on the values are gone."""
        names = [self._head(key) for key in keys]
        headers = self._wire.headers(names, end)
        removed = self._wire.drop(names, end)
        rest = [
            self._piece(key, head.put, index)
            for key, data in zip(keys, headers, strict=True)
            if data is not None and (head := _head_or_none(data, key)) is not None
            for index in range(1, head.count)
        ]
        if rest:
            self._wire.drop(rest, end)
        return sum(removed)

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """Walks all names of the server: for management, not for the request path."""
        found: set[bytes] = set()
        for name in self._wire.names(end):
            if (key := self._key(name)) > after:
                found.add(key)
                if len(found) > 2 * limit + 1000:
                    found = set(heapq.nsmallest(limit, found))
        first = heapq.nsmallest(limit, found)
        return [entry for entry in self.lookup(first, end) if entry is not None] if first else []

    def abort(self) -> None:
        """Cut the connection."""
        self._stream.abort()

    def close(self) -> None:
        """Leave."""
        self._stream.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _head(self, key: bytes) -> bytes:
        return b"%s{%s}" % (self._prefix, key.hex().encode())

    def _piece(self, key: bytes, put: bytes, index: int) -> bytes:
        return b"%s:%s:%d" % (self._head(key), put.hex().encode(), index)

    def _key(self, name: bytes) -> bytes:
        """The key of a head's name; empty: it is none."""
        digits = name[len(self._prefix) + 1 : -1]
        if len(digits) != 2 * KEY_BYTES or not name.startswith(self._prefix):
            return b""
        try:
            return bytes.fromhex(digits.decode("ascii"))
        except ValueError:
            return b""

    def _read_header(self, length: int, key: bytes, end: float) -> Piece:
        """The head's header; its payload is left on the stream. PieceError: it is none, and all of it has been read."""
        taken = min(length, HEADER_BYTES)
        try:
            head = pieces.read_head(self._stream.take(taken, end), key)
            if length - taken != head.length:
                raise PieceError(f"the head holds {length - taken} bytes, its header says {head.length}")
        except PieceError:
            self._forget(length - taken, end)
            raise
        return head

    def _lend(self, lend: Lend, head: Piece, end: float) -> PooledBuffer:
        try:
            return lend(head.num_bytes)
        except ServerError as error:
            self._forget(head.length, end)
            raise ServerError(error.reason, str(error), clean=True) from error

    def _receive(self, key: bytes, head: Piece, view: memoryview, end: float) -> None:
        """All pieces into `view`. PieceError: one is missing or not ours; the conversation is in step all the same."""
        rest = range(1, head.count)
        if rest:
            self._wire.send_fetch([self._piece(key, head.put, index) for index in rest], end)
        first = view[: head.length]
        self._stream.fill(first, end)
        self._wire.read_tail(end)
        damage: PieceError | None = None
        for index in rest:
            begin, stop = head.bounds(index)
            try:
                self._receive_piece(key, head, index, view[begin:stop], end)
            except PieceError as error:
                damage = error
        if damage is not None:
            raise damage

    def _receive_piece(self, key: bytes, head: Piece, index: int, view: memoryview, end: float) -> None:
        length = self._wire.read_length(end)
        if length is None:
            raise PieceError(f"piece {index} of {head.count} is missing")
        if length != HEADER_BYTES + view.nbytes:
            self._forget(length, end)
            raise PieceError(f"piece {index} has {length} bytes")
        header = self._stream.take(HEADER_BYTES, end)
        self._stream.fill(view, end)
        self._wire.read_tail(end)
        pieces.check_piece(header, key, head, index, view.nbytes)

    def _forget(self, num_bytes: int, end: float) -> None:
        """Read the rest of a body."""
        self._stream.skip(num_bytes, end)
        self._wire.read_tail(end)


def _head_or_none(data: bytes, key: bytes) -> Piece | None:
    try:
        return pieces.read_head(data, key)
    except PieceError:
        return None


def size_of_head(data: bytes, key: bytes) -> int:
    """Length of the value whose head begins with `data`, or GARBAGE."""
    head = _head_or_none(data, key)
    return GARBAGE if head is None else head.num_bytes
