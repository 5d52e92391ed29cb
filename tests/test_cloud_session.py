"""Reading objects of unknown length, without a server: nobody keeps a buffer while waiting for another one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.lease import BufferPool, PooledBuffer
from pdxfer.store.remote import cloud_session
from pdxfer.store.remote.cloud_session import FIRST_GUESS_BYTES, CloudSession, SizeGuess
from pdxfer.store.remote.errors import ServerError

MIB = 1 << 20
KEY = bytes(32)


class Operator:
    """Of opendal, as far as reads go."""

    def __init__(self, value: bytes | None) -> None:
        self.value = value
        self.num_opened = 0

    def open(self, name: str, mode: str) -> BytesIO:
        self.num_opened += 1
        if self.value is None:
            raise FileNotFoundError(name)
        return BytesIO(self.value)

    def stat(self, name: str) -> Any:
        if self.value is None:
            raise FileNotFoundError(name)
        return SimpleNamespace(content_length=len(self.value))


@pytest.fixture(autouse=True)
def _without_opendal(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: type(name, (Exception,), {}) for name in ("NotFound", "ConditionNotMatch", "AlreadyExists")}
    kinds |= {name: type(name, (Exception,), {}) for name in ("Unsupported", "PermissionDenied", "ConfigInvalid")}
    monkeypatch.setattr(cloud_session, "_exceptions", lambda: SimpleNamespace(**kinds))


def read(operator: Operator, pool: BufferPool, guess: SizeGuess | None = None, late: bool = False) -> bytes | None:
    session = CloudSession(operator, operator, "p/", ThreadPoolExecutor(1), guess or SizeGuess())

    def lend(num_bytes: int) -> PooledBuffer:
        assert not pool.lent_bytes, "a buffer is kept while another one is waited for"
        buffer = asyncio.run(pool.take(num_bytes, 0.0))
        assert buffer is not None
        return buffer

    buffer = session.read(KEY, lend, SYSTEM_CLOCK.now() + (-1.0 if late else 60.0))
    if buffer is None:
        return None
    value = bytes(buffer.view)
    buffer.give_back()
    return value


@pytest.mark.parametrize("size", [0, 1, FIRST_GUESS_BYTES, FIRST_GUESS_BYTES + 1, 5 * MIB, 9 * MIB + 17])
def test_a_value_of_any_length_needs_one_buffer_at_a_time(size: int) -> None:
    """Also one of more than half the pool; the second read knows the length."""
    pool, guess = BufferPool(12 * MIB), SizeGuess()
    operator = Operator(bytes(range(256)) * (size // 256) + bytes(size % 256))
    assert read(operator, pool, guess) == operator.value
    assert operator.num_opened == (1 if size <= FIRST_GUESS_BYTES else 2)
    assert read(operator, pool, guess) == operator.value
    assert operator.num_opened == (2 if size <= FIRST_GUESS_BYTES else 3)
    assert not pool.lent_bytes


def test_an_absent_or_late_value_keeps_no_buffer() -> None:
    pool = BufferPool(12 * MIB)
    assert read(Operator(None), pool) is None
    with pytest.raises(ServerError):
        read(Operator(bytes(5 * MIB)), pool, late=True)
    assert not pool.lent_bytes
