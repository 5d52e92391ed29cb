"""Values as objects, one each, through opendal: written whole and only if absent, read into buffers of ours.

opendal's own deadlines are the tier's timeouts; a call may outlast its deadline by that, so values are copied before
they come here (RemoteTier.overruns). A write that was given up may still land: it is the right value all the same.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import KEY_BYTES, Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.session import Lend
from pdxfer.store.remote.stream import remaining

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_GUESS_BYTES = 1 << 20


class SizeGuess:
    """How long the next value probably is: as the last one. Spares a read the question; wrong guesses cost a copy."""

    def __init__(self) -> None:
        self.num_bytes = FIRST_GUESS_BYTES


class CloudSession:
    """Implements Session. `reader` and `writer` are operators for the same place with their own timeouts."""

    def __init__(self, reader: Any, writer: Any, prefix: str, helpers: Executor, guess: SizeGuess) -> None:
        self._reader, self._writer, self._prefix = reader, writer, prefix
        self._helpers, self._guess = helpers, guess
        self._aborted = False

    def ping(self, end: float) -> None:
        """Whether the bucket is there and we may list it."""
        _translated(self._reader.check)

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """One question a key, several at a time."""
        sizes = self._each(lambda key: self._size(key, end), keys, end)
        return [
            Entry(key=key, num_bytes=size) if size is not None else None for key, size in zip(keys, sizes, strict=True)
        ]

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """One request; the buffer is as long as the last value and one byte, so that its end is seen. A longer value is
        read again into one that fits: whoever kept the short one while waiting would keep others waiting for it."""
        num_bytes: int | None = self._guess.num_bytes
        while num_bytes is not None:
            buffer = lend(num_bytes + 1)
            try:
                got = self._fill(key, buffer.view, end)
            except BaseException:
                buffer.give_back()
                raise
            if got is not None and got <= num_bytes:
                buffer.view = buffer.view[:got]
                self._guess.num_bytes = max(got, FIRST_GUESS_BYTES)
                return buffer
            buffer.give_back()
            num_bytes = self._size(key, end) if got is not None else None
        return None

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """One request, refused by the server if the object is there."""
        [body] = parts  # RemoteTier has put it together
        remaining(end)
        if self._size(key, end) is not None:
            return Outcome.ALREADY
        exceptions = _exceptions()
        try:
            _translated(self._writer.write, self._name(key), body, if_not_exists=True)
        except (exceptions.ConditionNotMatch, exceptions.AlreadyExists):
            return Outcome.ALREADY
        except exceptions.Unsupported:
            _translated(self._writer.write, self._name(key), body)
        return Outcome.STORED

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """Deleting what is not there is no error, so it is asked for first."""

        def one(key: bytes) -> bool:
            if self._size(key, end) is None:
                return False
            _translated(self._writer.delete, self._name(key))
            return True

        return sum(self._each(one, keys, end))

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """A listing, which is in the order of keys."""
        start = self._name(after) if after else None
        found: list[Entry] = []
        for entry in _translated(self._reader.list, self._prefix, start_after=start, recursive=True):
            self._check(end)
            key = _key(entry.path, self._prefix)
            if key > after:
                found.append(Entry(key=key, num_bytes=entry.metadata.content_length))
                if len(found) == limit:
                    break
        return found

    def abort(self) -> None:
        """Between two steps of a read; a request in progress ends by opendal's timeout."""
        self._aborted = True

    def close(self) -> None:
        """Connections belong to the operators."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _fill(self, key: bytes, view: memoryview, end: float) -> int | None:
        """The value's bytes, as many as fit: their number; None: absent."""
        at = 0
        try:
            with _translated(self._reader.open, self._name(key), "rb") as file:
                while at < len(view) and (got := _translated(file.readinto, view[at:])):
                    at += got
                    self._check(end)
        except FileNotFoundError:
            return None
        return at

    def _size(self, key: bytes, end: float) -> int | None:
        self._check(end)
        try:
            return int(_translated(self._reader.stat, self._name(key)).content_length)
        except FileNotFoundError:
            return None

    def _each(self, call: Callable[[bytes], T], keys: Sequence[bytes], end: float) -> list[T]:
        if len(keys) == 1:
            return [call(keys[0])]
        try:
            return list(self._helpers.map(call, keys, timeout=remaining(end)))
        except TimeoutError as error:
            raise ServerError(Reason.TIMEOUT, f"{len(keys)} questions took too long") from error

    def _check(self, end: float) -> None:
        if self._aborted or SYSTEM_CLOCK.now() >= end:
            raise ServerError(Reason.TIMEOUT, "the deadline came first", clean=not self._aborted)


def _key(path: str, prefix: str) -> bytes:
    """The key of an object's name; empty: it is none of ours."""
    digits = path.removeprefix(prefix)
    if len(digits) != 2 * KEY_BYTES or not path.startswith(prefix):
        return b""
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return b""


def _exceptions() -> Any:
    import opendal.exceptions

    return opendal.exceptions


def _translated(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`call`, with opendal's errors as ours; absent is FileNotFoundError, a condition that failed stays as it is."""
    exceptions = _exceptions()
    try:
        return call(*args, **options)
    except (FileNotFoundError, exceptions.NotFound) as error:
        raise FileNotFoundError(_said(error)) from error
    except (exceptions.ConditionNotMatch, exceptions.AlreadyExists, exceptions.Unsupported):
        raise
    except (PermissionError, exceptions.PermissionDenied, exceptions.ConfigInvalid) as error:
        raise ServerError(Reason.REFUSED, _said(error)) from error
    except _all(exceptions) as error:
        _raise_other(error)


def _all(exceptions: Any) -> tuple[type[Exception], ...]:
    """Its exceptions have no base in common; files raise OSError."""
    kinds = [kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (OSError, *kinds)


def _raise_other(error: Exception) -> NoReturn:
    text = str(error)
    if "timeout reached" in text:
        raise ServerError(Reason.TIMEOUT, _said(error)) from error
    if "InsufficientStorage" in text or "QuotaExceeded" in text or "StorageFull" in text:
        raise ServerError(Reason.FULL, _said(error), clean=True) from error
    if "(temporary)" in text:
        raise ServerError(Reason.UNREACHABLE, _said(error)) from error
    raise ServerError(Reason.PROTOCOL, _said(error)) from error


def _said(error: Exception) -> str:
    """opendal's message without headers and backtrace."""
    lines: Iterable[str] = str(error).split("\n")
    wanted = ("error sending request", "=>", "(permanent)", "(temporary)")
    return "; ".join(line.strip()[:300] for line in lines if any(word in line for word in wanted))[:600]
