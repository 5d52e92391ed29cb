"""What the Mooncake tier makes of its library's answers, on a pretend client: no server, no library."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.lease import BufferPool, PooledBuffer
from pdxfer.store.remote import mooncake
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.library import KeyLocks
from pdxfer.store.remote.mooncake import MooncakeSession, MooncakeTier, _Client
from pdxfer.testing.tier_kit import MIB, key_of

NOT_READY, ABSENT, LEASE_EXPIRED = -703, -704, -707
SIZE = 100


class Pretend:
    """Answers sizes and reads with the codes it was given; the last one stays."""

    def __init__(self, *, size: int = SIZE + 1, reads: tuple[int, ...] = (SIZE + 1,), removes: int = 0) -> None:
        self._size, self._reads, self._removes = size, list(reads), removes
        self.num_reads = 0

    def get_size(self, name: str) -> int:
        return self._size

    def register_buffer(self, at: int, num_bytes: int) -> int:
        return 0

    def unregister_buffer(self, at: int) -> int:
        return 0

    def get_into(self, name: str, at: int, num_bytes: int) -> int:
        self.num_reads += 1
        return self._reads.pop(0) if len(self._reads) > 1 else self._reads[0]

    def remove(self, name: str, force: bool) -> int:
        return self._removes


def read(store: Pretend, seconds: float = 10.0) -> PooledBuffer | None:
    """One read; all buffers are back if it gave none."""
    pool = BufferPool(MIB)

    def lend(num_bytes: int) -> PooledBuffer:
        buffer = pool.try_take(num_bytes)
        assert buffer is not None
        return buffer

    got = None
    try:
        got = MooncakeSession(_Client(store), "p:", KeyLocks()).read(key_of("a"), lend, SYSTEM_CLOCK.now() + seconds)
    finally:
        assert got is not None or pool.lent_bytes == 0
    return got


def test_a_read_whose_lease_ended_under_way_is_made_again() -> None:
    store = Pretend(reads=(LEASE_EXPIRED, LEASE_EXPIRED, SIZE + 1))
    got = read(store)
    assert got is not None and len(got.view) == SIZE and store.num_reads == 3


def test_but_not_beyond_the_deadline() -> None:
    store = Pretend(reads=(LEASE_EXPIRED,))
    with pytest.raises(ServerError) as caught:
        read(store, 0.05)
    assert caught.value.reason is Reason.TIMEOUT and store.num_reads > 1


@pytest.mark.parametrize("code", [NOT_READY, ABSENT])
def test_a_value_that_is_still_being_written_is_not_there_yet(code: int) -> None:
    """A miss, and no sign of a server that is away."""
    assert read(Pretend(size=code)) is None
    assert read(Pretend(reads=(code,))) is None
    session = MooncakeSession(_Client(Pretend(removes=code)), "p:", KeyLocks())
    assert session.remove([key_of("a")], SYSTEM_CLOCK.now() + 10) == 0


async def test_closing_while_a_thread_waits_for_the_master_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, begun, answered, closed = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), list[bool]()

    class Slow:
        """Answers when the loop lets it."""

        def setup(self, *_: object) -> int:
            loop.call_soon_threadsafe(begun.set)
            closed.append(answered.wait(10.0))
            return 0

        def close(self) -> None:
            closed.append(True)

        def is_exist(self, name: str) -> int:
            return 0

    monkeypatch.setattr(mooncake, "_load", lambda: SimpleNamespace(MooncakeDistributedStore=Slow))
    tier = MooncakeTier(TierConfig(url="mooncake://127.0.0.1:1?metadata=http://127.0.0.1:2/m"), SYSTEM_CLOCK)
    opening = asyncio.create_task(tier.open())
    await begun.wait()
    loop.call_later(0.05, answered.set)
    await tier.close()
    await opening
    assert closed == [True, True], "the loop went on meanwhile, and the client was ended"
