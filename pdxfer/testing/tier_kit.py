"""What the tests of tiers share: settings, an opened tier with short names for its calls, values, conditions.

`TierBase` carries the facts a kind of tier declares about itself; tier_suite.py and tier_space.py are the promises.
"""

import asyncio
import hashlib
import mmap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from pdxfer.config.store import Eviction, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Buffer, Entry, Outcome, Tier
from pdxfer.testing.fake_clock import FakeClock

WAIT_S = 20.0
"""Deadline of every wait here; nothing waits this long unless it is broken."""
MIB = 1 << 20


def key_of(name: object) -> bytes:
    """A key for a name: 32 bytes, the same in every run."""
    return hashlib.sha256(repr(name).encode()).digest()


def value_of(name: object, num_bytes: int) -> bytes:
    """Bytes that belong to a name: neither compressible nor equal to another's."""
    seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "little")
    return np.random.Generator(np.random.SFC64(seed)).bytes(num_bytes)


def on_pages(value: bytes) -> memoryview:
    """The value where chunks of the dram tier lie: from the start of a page of memory."""
    place = memoryview(mmap.mmap(-1, len(value)))
    place[:] = value
    return place


async def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Let the loop run until `condition`; AssertionError naming `what` after the deadline."""
    deadline = SYSTEM_CLOCK.now() + timeout_s
    while not condition():
        assert SYSTEM_CLOCK.now() < deadline, f"waited {timeout_s:g} s for: {what}"
        await asyncio.sleep(0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a test asks of the tier it opens."""

    capacity_bytes: int
    eviction: Eviction = "lru"
    ttl_s: float = 0.0
    tenant_quota: Mapping[str, int] = field(default_factory=dict)
    pin_fraction: float = 0.5

    def config(self, url: str, **options: str) -> TierConfig:
        """As a section of the configuration."""
        return TierConfig(
            url=url,
            capacity_gib=self.capacity_bytes / (1 << 30),
            eviction=self.eviction,
            ttl_s=self.ttl_s,
            options=options,
        )

    def limits(self) -> dict[str, Any]:
        """The keyword arguments of a tier's constructor."""
        return {"tenant_quota": self.tenant_quota, "pin_fraction": self.pin_fraction}


class Opened:
    """A tier under test, and its calls without the deadline."""

    def __init__(self, tier: Tier, clock: FakeClock) -> None:
        self.tier = tier
        self.clock = clock

    @property
    def soon(self) -> float:
        """A deadline that comes only if something hangs."""
        return self.clock.now() + WAIT_S

    async def put(self, key: bytes, value: bytes, tenant: str = "") -> Outcome:
        """Put `value` in three parts."""
        cut = len(value) // 3
        parts: list[Buffer] = [value[:cut], memoryview(value)[cut : 2 * cut], value[2 * cut :]]
        return await self.tier.put(key, parts, self.soon, tenant)

    async def stored(self, *names: object, num_bytes: int = 1000, tenant: str = "") -> None:
        """Put the values of these names and insist."""
        for name in names:
            assert await self.put(key_of(name), value_of(name, num_bytes), tenant) is Outcome.STORED, name

    async def get(self, key: bytes) -> bytes | None:
        """A copy of the value, or None."""
        lease = await self.tier.get(key, self.soon)
        if lease is None:
            return None
        async with lease:
            return bytes(lease.view)

    async def holds(self, *names: object) -> list[bool]:
        """Which of these names lookup knows."""
        return [entry is not None for entry in await self.entries(*names)]

    async def entries(self, *names: object) -> list[Entry | None]:
        """What lookup says of these names."""
        return await self.tier.lookup([key_of(name) for name in names], self.soon)

    async def all_returned(self) -> None:
        """No lease and no reservation is out (threads of the tier may need a moment)."""

        def returned() -> bool:
            stats = self.tier.stats()
            return stats.leases == 0 and stats.reservations == 0

        await until(returned, f"leases and reservations to come back: {self.tier.stats()}")


class TierBase:
    """Facts about the kind under test, overridden by the subclass; then the factory."""

    survives_restart = False
    """Values are there again after close and a new open of the same place."""
    in_place = False
    """A lease shows the stored bytes themselves, so it keeps their room occupied."""
    capacity_bound = True
    """Keeps to `capacity_gib` itself, evicting by `eviction`."""
    pins = True
    """`pin` can keep a value from eviction."""
    expires = True
    """`ttl_s` and the ttl of pins follow the Clock the tier was given."""
    scans = True
    """Can list its keys."""
    capacity_bytes = 32 * MIB
    """What the tests ask for; values of a sixteenth of it must fit at least twelve times."""
    max_value_bytes = 0
    """Values beyond this are TOO_LARGE; 0: only what exceeds the capacity, if there is one."""

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        """A tier, not yet opened, whose values live under `where` (a fresh directory each test; derive names and
        prefixes from it). Called again with the same `where` for a restart."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, where: Path, clock: FakeClock | None = None, **wanted: Any) -> AsyncIterator[Opened]:
        """An opened tier; closed at the end, after everything that was lent has come back."""
        clock = clock or FakeClock()
        wanted.setdefault("capacity_bytes", self.capacity_bytes)
        tier = self.make(where, clock, Wanted(**wanted))
        await tier.open()
        opened = Opened(tier, clock)
        async with closing(tier):
            yield opened
            await opened.all_returned()

    def needs(self, flag: bool, why: str) -> None:
        """Leave a test out that this kind does not promise."""
        if not flag:
            pytest.skip(f"does not apply: {why}")


class closing:
    """Close a tier at the end of a block."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    async def __aenter__(self) -> Tier:
        return self._tier

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tier.close()
