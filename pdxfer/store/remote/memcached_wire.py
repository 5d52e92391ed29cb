"""Memcached's meta commands for pieces (PieceWire): mg, ms, md. Needs memcached >= 1.6.

The client flags of a head hold the value's length, so that a lookup moves no bytes. Items are at most `item_size_max`
of the server, asked for at connect.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import unquote_to_bytes

from pdxfer.store.base import Buffer
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.piece_session import GARBAGE
from pdxfer.store.remote.pieces import HEADER_BYTES, PIECE_BYTES
from pdxfer.store.remote.stream import Stream
from pdxfer.store.remote.url import Address

MAX_VALUE_BYTES = (1 << 32) - 1
"""Client flags have 32 bits."""
_ITEM_EXTRA_BYTES = 512
"""Name and item header, which count into item_size_max."""
_LEAST_ITEM_BYTES = 4096
_MONTH_S = 30 * 24 * 3600
"""Longer ttls are taken for a moment since the epoch."""


class MemcachedWire:
    """Implements PieceWire. The constructor connects and asks for the item size; it raises ServerError."""

    def __init__(
        self, address: Address, ttl_s: float, unfinished_s: float, wall: Callable[[], float], end: float
    ) -> None:
        self._ttl_s, self._unfinished_s, self._wall = ttl_s, unfinished_s, wall
        self.stream = Stream(address, end)
        try:
            self.room = min(PIECE_BYTES, self._item_bytes(end) - _ITEM_EXTRA_BYTES) - HEADER_BYTES
        except BaseException:
            self.stream.close()
            raise

    def ping(self, end: float) -> None:
        """mn."""
        self.stream.send([b"mn\r\n"], end)
        self._expect(self._line(end), b"MN")

    def send_sizes(self, names: Sequence[bytes], end: float) -> None:
        """mg with flags and size, no bytes. Whether they are ours a get finds out."""
        self.stream.send([b"".join(b"mg %s f s\r\n" % name for name in names)], end)

    def read_size(self, key: bytes, end: float) -> int | None:
        """HD and flags, or EN."""
        return self._size(self._line(end))

    def headers(self, names: Sequence[bytes], end: float) -> list[bytes | None]:
        """There are no ranges: the whole heads pass by. For deletes only."""
        self.send_fetch(names, end)
        found: list[bytes | None] = []
        for _ in names:
            length = self.read_length(end)
            if length is not None:
                taken = min(length, HEADER_BYTES)
                found.append(self.stream.take(taken, end))
                self.stream.skip(length - taken, end)
                self.read_tail(end)
            else:
                found.append(None)
        return found

    def send_store(
        self, name: bytes, body: Sequence[Buffer], value_bytes: int, end: float, *, head: bool, lasts: bool
    ) -> None:
        """ms; a head with mode E (add)."""
        length = sum(memoryview(part).nbytes for part in body)
        ttl = self._exptime(self._ttl_s if lasts else self._unfinished_s)
        mode = b" ME" if head else b""
        self.stream.send([b"ms %s %d T%d F%d%s\r\n" % (name, length, ttl, value_bytes, mode), *body, b"\r\n"], end)

    def read_stored(self, end: float) -> bool | ServerError:
        """HD, NS where there is one, or no room."""
        line = self._line(end)
        if line.startswith(b"SERVER_ERROR"):
            full = b"out of memory" in line.lower() or b"too large" in line
            return self._error(line, Reason.FULL if full else Reason.PROTOCOL)
        return self._expect(line, b"HD", b"NS") == b"HD"

    def send_keep(self, names: Sequence[bytes], end: float) -> None:
        """mg with a new ttl and no bytes."""
        ttl = self._exptime(self._ttl_s)
        self.stream.send([b"".join(b"mg %s T%d\r\n" % (name, ttl) for name in names)], end)

    def read_kept(self, end: float) -> bool:
        """HD, or EN if it is gone."""
        return self._expect(self._line(end), b"HD", b"EN") == b"HD"

    def send_fetch(self, names: Sequence[bytes], end: float) -> None:
        """mg with the value."""
        self.stream.send([b"".join(b"mg %s v\r\n" % name for name in names)], end)

    def read_length(self, end: float) -> int | None:
        """VA <length>, or EN."""
        line = self._line(end)
        word = self._expect(line, b"VA", b"EN", b"HD")
        if word == b"EN":
            return None
        try:
            return int(line.split()[1])
        except (ValueError, IndexError) as error:
            raise ServerError(Reason.PROTOCOL, f"{self.stream.address} sent {line[:80]!r}") from error

    def read_tail(self, end: float) -> None:
        """CR LF."""
        if self.stream.take(2, end) != b"\r\n":
            raise ServerError(Reason.PROTOCOL, f"{self.stream.address} sent a value of another length than announced")

    def drop(self, names: Sequence[bytes], end: float) -> list[bool]:
        """md."""
        self.stream.send([b"".join(b"md %s\r\n" % name for name in names)], end)
        return [self._expect(self._line(end), b"HD", b"NF") == b"HD" for _ in names]

    def names(self, end: float) -> Iterable[bytes]:
        """The crawler's dump of all names; its lines end with LF alone."""
        self.stream.send([b"lru_crawler metadump all\r\n"], end)
        while (line := self.stream.line(end, b"\n").rstrip(b"\r")) != b"END":
            if not line.startswith(b"key="):
                raise self._error(line, Reason.BUSY if line.startswith(b"BUSY") else Reason.PROTOCOL)
            yield unquote_to_bytes(line[4:].split(b" ", 1)[0])

    def _size(self, line: bytes) -> int | None:
        word = self._expect(line, b"HD", b"EN")
        facts = re.fullmatch(rb"HD f(\d+) s(\d+)", line)
        if word == b"EN":
            return None
        if facts is None:
            raise self._error(line, Reason.PROTOCOL)
        value_bytes, head_bytes = int(facts[1]), int(facts[2])
        return value_bytes if HEADER_BYTES <= head_bytes <= HEADER_BYTES + value_bytes else GARBAGE

    def _item_bytes(self, end: float) -> int:
        self.stream.send([b"stats settings\r\n"], end)
        found = 0
        while (line := self._line(end)) != b"END":
            if not line.startswith(b"STAT "):
                raise self._error(line, Reason.PROTOCOL)
            if line.startswith(b"STAT item_size_max "):
                found = int(line.split()[2])
        if found < _LEAST_ITEM_BYTES:
            raise ServerError(
                Reason.REFUSED,
                f"{self.stream.address} takes items of {found} bytes; start it with -I {_LEAST_ITEM_BYTES} or more",
            )
        return found

    def _exptime(self, ttl_s: float) -> int:
        ttl = -(-ttl_s // 1)
        return int(ttl if ttl <= _MONTH_S else self._wall() + ttl)

    def _line(self, end: float) -> bytes:
        return self.stream.line(end)

    def _expect(self, line: bytes, *words: bytes) -> bytes:
        word = line[:2]
        if word not in words:
            raise self._error(line, Reason.PROTOCOL)
        return word

    def _error(self, line: bytes, reason: Reason) -> ServerError:
        said = line[:120].decode("utf-8", "replace")
        return ServerError(reason, f"{self.stream.address} answered {said!r}", clean=reason is Reason.FULL)
