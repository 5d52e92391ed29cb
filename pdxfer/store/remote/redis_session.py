"""One connection to a Redis or Valkey server: values as pieces (pieces.py), pipelined, all or nothing.

    head    {prefix}{<key>}               piece 0, written last with NX: it alone makes the value visible
    piece i {prefix}{<key>}:<put>:<i>     expires soon unless its head gets written: a writer that dies leaves nothing

The braces are Redis's hash tag: all pieces of a value live on one server of a cluster. Copies: none of ours.
"""

import heapq
import re
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from pdxfer.store.base import KEY_BYTES, Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.remote import pieces
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.pieces import HEADER_BYTES, PIECE_BYTES, Piece, PieceError
from pdxfer.store.remote.resp import (
    Reply,
    RespError,
    command,
    expect_end,
    raise_error,
    read_bulk_length,
    read_reply,
    set_command,
)
from pdxfer.store.remote.session import Lend
from pdxfer.store.remote.stream import Stream
from pdxfer.store.remote.url import Address

ROOM = PIECE_BYTES - HEADER_BYTES
_SCAN_COUNT = b"1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLogin:
    """How to come in."""

    user: str = ""
    password: str = ""
    db: int = 0
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisNaming:
    """How values are called there, and how long they stay."""

    prefix: bytes
    ttl_ms: int = 0
    """0: until the server evicts them."""
    unfinished_ms: int = 60_000
    """Pieces whose head does not come are gone after this."""

    def head(self, key: bytes) -> bytes:
        """Name of piece 0."""
        return b"%s{%s}" % (self.prefix, key.hex().encode())

    def piece(self, key: bytes, put: bytes, index: int) -> bytes:
        """Name of another piece."""
        return b"%s:%s:%d" % (self.head(key), put.hex().encode(), index)


class RedisSession:
    """Implements Session."""

    def __init__(self, address: Address, login: RedisLogin, naming: RedisNaming, end: float) -> None:
        self._naming = naming
        self._stream = Stream(address, end, login.tls)
        try:
            self._log_in(login, end)
        except BaseException:
            self._stream.close()
            raise

    def ping(self, end: float) -> None:
        """PING."""
        self._ask([command(b"PING")], end)

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """The headers of the heads, in one round trip."""
        heads = self._heads(keys, end)
        return [
            Entry(key=key, num_bytes=head.num_bytes) if isinstance(head, Piece) else None
            for key, head in zip(keys, heads, strict=True)
        ]

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """The head's header says how long the value is; then the other pieces are asked for while the head arrives."""
        self._stream.send([command(b"GET", self._naming.head(key))], end)
        length = self._bulk_length(end)
        if length is None:
            return None
        head = self._head_of_bulk(length, key, end)
        try:
            buffer = lend(head.num_bytes)
        except ServerError as error:
            self._rest(length - HEADER_BYTES, end)
            raise ServerError(error.reason, str(error), clean=True) from error
        try:
            whole = self._receive(key, head, buffer.view, end)
        except BaseException:
            buffer.give_back()
            raise
        if not whole:
            buffer.give_back()
            self._ask([command(b"DEL", self._naming.head(key))], end)  # else nobody could store the value again
            raise ServerError(Reason.DAMAGED, f"value {key.hex()[:12]} is not whole", clean=True)
        return buffer

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """Pieces first, each answer read, then the head unless another writer's is there."""
        [known] = self._heads([key], end)
        if isinstance(known, Piece):
            return Outcome.ALREADY
        put, payloads = secrets.token_bytes(8), pieces.split(parts, ROOM)
        names = [self._naming.piece(key, put, index) for index in range(1, len(payloads))]

        def body(index: int) -> list[Buffer]:
            return [pieces.seal(key, put, index, len(payloads), num_bytes, payloads[index]), *payloads[index]]

        unfinished = (b"PX", b"%d" % self._naming.unfinished_ms)
        for index, name in enumerate(names, 1):
            self._send_set(name, body(index), unfinished, end)
        failed = self._errors(len(names), end)
        if not failed:
            for name in names:
                self._stream.send([self._keep(name)], end)
            once = () if known is _GARBAGE else (b"NX",)
            ttl = (b"PX", b"%d" % self._naming.ttl_ms) if self._naming.ttl_ms else ()
            self._send_set(self._naming.head(key), body(0), (*once, *ttl), end)
            kept = [read_reply(self._stream, end) for _ in names]
            stored = read_reply(self._stream, end)
            if stored == b"OK" and all(answer == 1 for answer in kept):
                return Outcome.STORED
            failed = [answer for answer in (*kept, stored) if isinstance(answer, RespError)]
            if stored == b"OK":
                names.append(self._naming.head(key))
        if names:
            self._ask([command(b"UNLINK", *names)], end)
        if failed:
            raise_error(failed[0], f"SET on {self._stream.address}")
        return Outcome.ALREADY if stored is None else Outcome.FULL

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """Heads first: from then on the values are gone."""
        heads = self._heads(keys, end)
        commands = [command(b"UNLINK", self._naming.head(key)) for key in keys]
        removed = self._ask(commands, end)
        rest = [
            command(b"UNLINK", *(self._naming.piece(key, head.put, index) for index in range(1, head.count)))
            for key, head in zip(keys, heads, strict=True)
            if isinstance(head, Piece) and head.count > 1
        ]
        if rest:
            self._ask(rest, end)
        return sum(answer for answer in removed if isinstance(answer, int))

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """Walks all names of the server: for management, not for the request path."""
        escaped = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self._naming.prefix)
        found: set[bytes] = set()
        cursor = b"0"
        while True:
            [page] = self._ask([command(b"SCAN", cursor, b"MATCH", escaped + b"{*}", b"COUNT", _SCAN_COUNT)], end)
            if not isinstance(page, list) or not isinstance(page[0], bytes) or not isinstance(page[1], list):
                raise ServerError(Reason.PROTOCOL, f"{self._stream.address} answered SCAN with {page!r:.80}")
            found.update(key for name in page[1] if isinstance(name, bytes) and (key := self._key(name)) > after)
            found = set(heapq.nsmallest(limit, found))
            cursor = page[0]
            if cursor == b"0":
                break
        return [entry for entry in self.lookup(sorted(found), end) if entry is not None]

    def abort(self) -> None:
        """Cut the connection."""
        self._stream.abort()

    def close(self) -> None:
        """Leave."""
        self._stream.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _log_in(self, login: RedisLogin, end: float) -> None:
        commands = []
        if login.password:
            user = [login.user.encode()] if login.user else []
            commands.append(command(b"AUTH", *user, login.password.encode()))
        if login.db:
            commands.append(command(b"SELECT", b"%d" % login.db))
        for words in commands:
            self._stream.send([words], end)
            answer = read_reply(self._stream, end)
            if isinstance(answer, RespError):
                who = f"user {login.user or 'default'!r}, db {login.db}"
                raise ServerError(
                    Reason.REFUSED,
                    f"{self._stream.address} refuses {who}: {answer.text}; correct user, password or db in the url",
                )

    def _heads(self, keys: Sequence[bytes], end: float) -> "list[Piece | object | None]":
        """Of each key the head's header, None (absent) or _GARBAGE (something else lies there)."""
        last = b"%d" % (HEADER_BYTES - 1)
        answers = self._ask([command(b"GETRANGE", self._naming.head(key), b"0", last) for key in keys], end)
        return [_head(answer, key) for answer, key in zip(answers, keys, strict=True)]

    def _head_of_bulk(self, length: int, key: bytes, end: float) -> Piece:
        """The head's header, off a bulk reply that begins; leaves the payload to be received."""
        taken = min(length, HEADER_BYTES)
        try:
            head = pieces.read_head(self._stream.take(taken, end), key)
            if length - taken == head.length:
                return head
            error = PieceError(f"the head holds {length - taken} bytes, its header says {head.length}")
        except PieceError as problem:
            error = problem
        self._rest(length - taken, end)
        raise ServerError(Reason.DAMAGED, f"value {key.hex()[:12]}: {error}", clean=True) from error

    def _receive(self, key: bytes, head: Piece, view: memoryview, end: float) -> bool:
        """All pieces into `view`; False: one is missing or not ours. The conversation stays in step."""
        self._stream.send(
            [command(b"GET", self._naming.piece(key, head.put, index)) for index in range(1, head.count)], end
        )
        first = view[: head.length]
        self._stream.fill(first, end)
        expect_end(self._stream, end)
        whole = pieces.payload_matches(head, first)
        for index in range(1, head.count):
            begin, stop = head.bounds(index)
            whole &= self._receive_piece(key, head, index, view[begin:stop], end)
        return whole

    def _receive_piece(self, key: bytes, head: Piece, index: int, view: memoryview, end: float) -> bool:
        length = self._bulk_length(end)
        if length is None:
            return False
        if length != HEADER_BYTES + view.nbytes:
            self._rest(length, end)
            return False
        header = self._stream.take(HEADER_BYTES, end)
        self._stream.fill(view, end)
        expect_end(self._stream, end)
        try:
            pieces.check_piece(header, key, head, index, view)
        except PieceError:
            return False
        return True

    def _bulk_length(self, end: float) -> int | None:
        length = read_bulk_length(self._stream, end)
        if isinstance(length, RespError):
            raise_error(length, f"GET on {self._stream.address}")
        return length

    def _rest(self, num_bytes: int, end: float) -> None:
        """Forget the rest of a bulk reply."""
        self._stream.skip(num_bytes, end)
        expect_end(self._stream, end)

    def _send_set(self, name: bytes, body: Sequence[Buffer], options: Sequence[bytes], end: float) -> None:
        length = sum(memoryview(part).nbytes for part in body)
        self._stream.send(set_command(name, body, length, *options), end)

    def _keep(self, name: bytes) -> bytes:
        """The command that gives a piece the life of its value."""
        ttl_ms = self._naming.ttl_ms
        return command(b"PEXPIRE", name, b"%d" % ttl_ms) if ttl_ms else command(b"PERSIST", name)

    def _errors(self, count: int, end: float) -> list[RespError]:
        answers = [read_reply(self._stream, end) for _ in range(count)]
        return [answer for answer in answers if isinstance(answer, RespError)]

    def _ask(self, commands: Sequence[bytes], end: float) -> list[Reply]:
        """A pipeline of short questions; the first error among the answers is raised when all have been read."""
        self._stream.send([b"".join(commands)], end)
        answers = [read_reply(self._stream, end) for _ in commands]
        for answer in answers:
            if isinstance(answer, RespError):
                raise_error(answer, str(self._stream.address))
        return answers

    def _key(self, name: bytes) -> bytes:
        """The key of a head's name; empty: it is none."""
        digits = name[len(self._naming.prefix) + 1 : -1]
        if len(digits) != 2 * KEY_BYTES:
            return b""
        try:
            return bytes.fromhex(digits.decode("ascii"))
        except ValueError:
            return b""


_GARBAGE = object()


def _head(answer: Reply, key: bytes) -> "Piece | object | None":
    if answer == b"" or not isinstance(answer, bytes):
        return None
    try:
        return pieces.read_head(answer, key)
    except PieceError:
        return _GARBAGE
