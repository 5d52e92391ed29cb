"""A tier whose medium misbehaves on command: wraps any tier. Tests of the store (and of plug-ins) drive it.

down      calls fail at once: misses, FAILED, `reachable` False           frozen   calls do not end until cancelled
slow_s    each call takes so long (of the loop's time)                    raising  calls raise, against the contract
damage    what `get` shows, a function bytes → bytes                      deaf     frozen, and ignores cancellation
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from pdxfer.store.base import Buffer, Entry, EvictionNotices, Lease, Outcome, Reservation, Tier, TierStats

T = TypeVar("T")


class FaultyTier:
    """Set the attributes at any time; they hold for calls made from then on."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.down = False
        self.frozen = False
        self.deaf = False
        self.raising = False
        self.slow_s = 0.0
        self.damage: Callable[[bytes], bytes] | None = None
        self.calls: list[str] = []
        """Names of the calls that came, in order."""
        self._thaw = asyncio.Event()

    @property
    def kind(self) -> str:
        return self.inner.kind

    def thaw(self) -> None:
        """Frozen and deaf calls that are out go on (and later ones are not frozen)."""
        self.frozen = self.deaf = False
        self._thaw.set()

    async def open(self) -> None:
        await self.inner.open()

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        return await self._call("lookup", lambda: self.inner.lookup(keys, deadline), [None] * len(keys))

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        return await self._call("reserve", lambda: self.inner.reserve(key, num_bytes, deadline, tenant), Outcome.FAILED)

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        return await self._call("put", lambda: self.inner.put(key, parts, deadline, tenant), Outcome.FAILED)

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        lease: Lease | None = await self._call("get", lambda: self.inner.get(key, deadline), None)
        if lease is not None and self.damage is not None:
            return _Damaged(lease, self.damage)
        return lease

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        return await self._call("delete", lambda: self.inner.delete(keys, deadline), 0)

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        return await self._call("pin", lambda: self.inner.pin(keys, ttl_s, deadline), 0)

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        return await self._call("unpin", lambda: self.inner.unpin(keys, deadline), 0)

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        return await self._call("scan", lambda: self.inner.scan(after, limit, deadline), [])

    def stats(self) -> TierStats:
        stats = self.inner.stats()
        return replace(stats, reachable=stats.reachable and not self.down)

    def take_evicted(self) -> list[bytes] | None:
        return self.inner.take_evicted() if isinstance(self.inner, EvictionNotices) else []

    async def close(self) -> None:
        self.thaw()
        await self.inner.close()

    async def _call(self, name: str, work: Callable[[], Awaitable[T]], failed: Any) -> T:
        self.calls.append(name)
        if self.raising:
            raise OSError("the medium is on fire")
        if self.down:
            return failed  # type: ignore[no-any-return]  # the call's own word for failure
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        while self.frozen or self.deaf:
            self._thaw.clear()
            try:
                await self._thaw.wait()
            except asyncio.CancelledError:
                if not self.deaf:
                    raise
        return await work()


class _Damaged:
    """A lease that shows other bytes."""

    def __init__(self, lease: Lease, damage: Callable[[bytes], bytes]) -> None:
        self._lease = lease
        self.view = memoryview(damage(bytes(lease.view)))

    def release(self) -> None:
        self._lease.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
