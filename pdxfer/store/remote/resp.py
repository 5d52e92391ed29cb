"""The Redis protocol (RESP2) on a Stream: commands gathered on send, bulk replies received where they belong.

A RespError is an answer, not an exception: whoever pipelines must read all answers before giving up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from pdxfer.store.base import Buffer
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.stream import Stream

MAX_BULK_BYTES = 1 << 20
"""Replies that are not values (lines of scripts, lists of keys) are never longer than this."""


@dataclass(frozen=True, slots=True)
class RespError:
    """The server's words, beginning with a code in capitals."""

    text: str

    @property
    def reason(self) -> Reason:
        """What to make of it."""
        code = self.text.split(" ", 1)[0]
        return _REASONS.get(code, Reason.PROTOCOL)


_REASONS = {
    "NOAUTH": Reason.REFUSED,
    "WRONGPASS": Reason.REFUSED,
    "NOPERM": Reason.REFUSED,
    "OOM": Reason.FULL,
    "MISCONF": Reason.FULL,
    "MOVED": Reason.MOVED,
    "ASK": Reason.MOVED,
    "TRYAGAIN": Reason.MOVED,
    "READONLY": Reason.MOVED,
    "CLUSTERDOWN": Reason.MOVED,
    "MASTERDOWN": Reason.MOVED,
    "LOADING": Reason.UNREACHABLE,
}

Reply = Union[bytes, int, None, RespError, "list[Reply]"]


def command(*words: bytes) -> bytes:
    """One command with short arguments."""
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))


def value_command(words: Sequence[bytes], body: Sequence[Buffer], *options: bytes) -> list[Buffer]:
    """A command with a large value after `words`, sent from where it lies."""
    length = sum(memoryview(part).nbytes for part in body)
    count = b"*%d\r\n" % (len(words) + 1 + len(options))
    head = count + b"".join(map(_word, words)) + b"$%d\r\n" % length
    return [head, *body, b"\r\n" + b"".join(map(_word, options))]


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def read_reply(stream: Stream, end: float) -> Reply:
    """One answer of any kind, of moderate length."""
    line = stream.line(end)
    mark, rest = line[:1], line[1:]
    try:
        match mark:
            case b"+":
                return rest
            case b"-":
                return RespError(rest.decode("utf-8", "replace"))
            case b":":
                return int(rest)
            case b"$":
                return _bulk(stream, int(rest), end)
            case b"*":
                return None if rest == b"-1" else [read_reply(stream, end) for _ in range(int(rest))]
    except ValueError as error:
        raise ServerError(Reason.PROTOCOL, f"{stream.address} sent {line[:80]!r}") from error
    raise ServerError(Reason.PROTOCOL, f"{stream.address} does not speak RESP2: it sent {line[:80]!r}")


def read_bulk_length(stream: Stream, end: float) -> int | None | RespError:
    """The length of a bulk reply whose body (and CR LF) the caller receives; None: no such key."""
    line = stream.line(end)
    if line[:1] == b"-":
        return RespError(line[1:].decode("utf-8", "replace"))
    if line[:1] != b"$" or not line[1:].lstrip(b"-").isdigit():
        raise ServerError(Reason.PROTOCOL, f"{stream.address} sent {line[:80]!r} where a value was due")
    length = int(line[1:])
    return length if length >= 0 else None


def expect_end(stream: Stream, end: float) -> None:
    """The CR LF after a bulk body."""
    if stream.take(2, end) != b"\r\n":
        raise ServerError(Reason.PROTOCOL, f"{stream.address} sent a value of another length than announced")


def as_error(answer: RespError, what: str, in_step: bool = True) -> ServerError:
    """`in_step`: to be raised when all answers have been read."""
    clean = in_step and answer.reason in (Reason.FULL, Reason.MOVED, Reason.PROTOCOL)
    return ServerError(answer.reason, f"{what}: {answer.text}", clean=clean)


def _bulk(stream: Stream, length: int, end: float) -> bytes | None:
    if length < 0:
        return None
    if length > MAX_BULK_BYTES:
        raise ServerError(Reason.PROTOCOL, f"{stream.address} sent {length} bytes where a few were due")
    body = stream.take(length, end)
    expect_end(stream, end)
    return body
