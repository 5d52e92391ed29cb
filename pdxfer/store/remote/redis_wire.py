"""Redis's and Valkey's commands for pieces (PieceWire), and how a connection logs in."""

import re
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdxfer.store.base import Buffer
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.piece_session import size_of_head
from pdxfer.store.remote.pieces import HEADER_BYTES, PIECE_BYTES
from pdxfer.store.remote.resp import (
    Reply,
    RespError,
    as_error,
    command,
    expect_end,
    read_bulk_length,
    read_reply,
    value_command,
)
from pdxfer.store.remote.stream import Stream
from pdxfer.store.remote.url import Address

ROOM = PIECE_BYTES - HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLogin:
    """How to come in."""

    user: str = ""
    password: str = ""
    db: int = 0
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTimes:
    """How long things stay."""

    ttl_ms: int = 0
    """Of values; 0: until the server evicts them."""
    unfinished_ms: int = 60_000
    """Pieces whose head does not come are gone after this."""


class RedisWire:
    """Implements PieceWire. The constructor connects and logs in; it raises ServerError."""

    room = ROOM

    def __init__(self, address: Address, login: RedisLogin, times: RedisTimes, prefix: bytes, end: float) -> None:
        self._prefix, self._ttl_ms = prefix, times.ttl_ms
        self._unfinished = b"%d" % times.unfinished_ms
        self.stream = Stream(address, end, login.tls)
        try:
            self._log_in(login, end)
        except BaseException:
            self.stream.close()
            raise

    def ping(self, end: float) -> None:
        """PING."""
        self._ask([command(b"PING")], end)

    def send_sizes(self, names: Sequence[bytes], end: float) -> None:
        """GETRANGE of the headers."""
        self.stream.send([b"".join(_header_command(name) for name in names)], end)

    def read_size(self, key: bytes, end: float) -> int | None:
        """From the header; an absent key is an empty string."""
        answer = read_reply(self.stream, end)
        if isinstance(answer, RespError):
            raise as_error(answer, str(self.stream.address), in_step=False)  # further answers are on their way
        return size_of_head(answer, key) if isinstance(answer, bytes) and answer else None

    def headers(self, names: Sequence[bytes], end: float) -> list[bytes | None]:
        """GETRANGE."""
        answers = self._ask([_header_command(name) for name in names], end)
        return [answer if isinstance(answer, bytes) and answer else None for answer in answers]

    def send_store(
        self, name: bytes, body: Sequence[Buffer], value_bytes: int, end: float, *, head: bool, lasts: bool
    ) -> None:
        """PSETEX and SETNX, whose value comes last, where they do: one event less for the server than options behind
        it."""
        ttl = b"%d" % self._ttl_ms if lasts else self._unfinished
        if not head:
            sent = value_command([b"PSETEX", name, ttl], body)
        elif lasts and not self._ttl_ms:
            sent = value_command([b"SETNX", name], body)
        else:
            sent = value_command([b"SET", name], body, b"NX", b"PX", ttl)
        self.stream.send(sent, end)

    def read_stored(self, end: float) -> bool | ServerError:
        """OK or 1; nil or 0 where there was one."""
        answer = read_reply(self.stream, end)
        if isinstance(answer, RespError):
            return as_error(answer, f"SET on {self.stream.address}")
        return answer in (b"OK", 1)

    def send_keep(self, names: Sequence[bytes], end: float) -> None:
        """PERSIST, or the value's ttl."""
        ttl = b"%d" % self._ttl_ms
        words = [(b"PEXPIRE", name, ttl) if self._ttl_ms else (b"PERSIST", name) for name in names]
        self.stream.send([b"".join(command(*each) for each in words)], end)

    def read_kept(self, end: float) -> bool:
        """1, or 0 if it is gone."""
        return read_reply(self.stream, end) == 1

    def send_fetch(self, names: Sequence[bytes], end: float) -> None:
        """GET."""
        self.stream.send([b"".join(command(b"GET", name) for name in names)], end)

    def read_length(self, end: float) -> int | None:
        """Of a bulk reply."""
        length = read_bulk_length(self.stream, end)
        if isinstance(length, RespError):
            raise as_error(length, f"GET on {self.stream.address}")
        return length

    def read_tail(self, end: float) -> None:
        """CR LF."""
        expect_end(self.stream, end)

    def drop(self, names: Sequence[bytes], end: float) -> list[bool]:
        """UNLINK: the memory is freed behind our back."""
        return [answer == 1 for answer in self._ask([command(b"UNLINK", name) for name in names], end)]

    def names(self, end: float) -> Iterable[bytes]:
        """SCAN."""
        pattern = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self._prefix) + b"{*}"
        cursor = b"0"
        while True:
            [page] = self._ask([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")], end)
            if not isinstance(page, list) or not isinstance(page[0], bytes) or not isinstance(page[1], list):
                raise ServerError(Reason.PROTOCOL, f"{self.stream.address} answered SCAN with {page!r:.80}")
            yield from (name for name in page[1] if isinstance(name, bytes))
            cursor = page[0]
            if cursor == b"0":
                return

    def _log_in(self, login: RedisLogin, end: float) -> None:
        commands = []
        if login.password:
            user = [login.user.encode()] if login.user else []
            commands.append(command(b"AUTH", *user, login.password.encode()))
        if login.db:
            commands.append(command(b"SELECT", b"%d" % login.db))
        for words in commands:
            self.stream.send([words], end)
            answer = read_reply(self.stream, end)
            if isinstance(answer, RespError):
                who = f"user {login.user or 'default'!r}, db {login.db}"
                raise ServerError(
                    Reason.REFUSED,
                    f"{self.stream.address} refuses {who}: {answer.text}; correct user, password or db in the url",
                )

    def _ask(self, commands: Sequence[bytes], end: float) -> list[Reply]:
        """A pipeline of short questions; the first error among the answers is raised when all have been read."""
        self.stream.send([b"".join(commands)], end)
        answers = [read_reply(self.stream, end) for _ in commands]
        for answer in answers:
            if isinstance(answer, RespError):
                raise as_error(answer, str(self.stream.address))
        return answers


def _header_command(name: bytes) -> bytes:
    return command(b"GETRANGE", name, b"0", b"%d" % (HEADER_BYTES - 1))
