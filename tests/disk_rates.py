"""Put and get rates of the local tiers against plain O_DIRECT pwrite and pread of the same sizes, in one run.

    python tests/disk_rates.py DIR [VALUE_MIB [NUM_VALUES [ROUNDS]]]

Arms alternate in every round; printed are medians of GB/s and of the ratio to the plain arm of the same round.
"""

import asyncio
import mmap
import os
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier

MIB = 1 << 20
ARMS = ("file", "lmdb", "sqlite")


def plain(place: Path, value: memoryview, count: int) -> tuple[float, float]:
    """GB/s of writing and reading `count` values, one at a time, in a file allocated beforehand."""
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, count * len(value))
    start = SYSTEM_CLOCK.now()
    for number in range(count):
        assert os.pwrite(fd, value, number * len(value)) == len(value)
    middle = SYSTEM_CLOCK.now()
    target = memoryview(mmap.mmap(-1, len(value)))
    for number in range(count):
        assert os.preadv(fd, [target], number * len(value)) == len(value)
    end = SYSTEM_CLOCK.now()
    os.close(fd)
    gigabytes = count * len(value) / 1e9
    return gigabytes / (middle - start), gigabytes / (end - middle)


async def tier_rates(url: str, value: memoryview, count: int) -> tuple[float, float]:
    """The same through a tier, page cache dropped before the gets."""
    capacity = count * len(value) * 5 / 4 + 64 * MIB
    tier = await open_tier(TierConfig(url=url, capacity_gib=capacity / (1 << 30)), SYSTEM_CLOCK)
    keys = [number.to_bytes(32, "big") for number in range(count)]
    soon = SYSTEM_CLOCK.now() + 600
    start = SYSTEM_CLOCK.now()
    for key in keys:
        assert await tier.put(key, [value], soon) is Outcome.STORED
    middle = SYSTEM_CLOCK.now()
    for path in (p for p in Path(url.split("://")[1]).parent.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    cold = SYSTEM_CLOCK.now()
    for key in keys:
        lease = await tier.get(key, soon)
        assert lease is not None
        lease.release()
    end = SYSTEM_CLOCK.now()
    await tier.close()
    gigabytes = count * len(value) / 1e9
    return gigabytes / (middle - start), gigabytes / (end - cold)


def measure(place: Path, value_bytes: int, count: int, rounds: int) -> dict[str, tuple[float, float, float, float]]:
    """Arm → medians: put and get in GB/s, put and get relative to plain. For other benches to call."""
    value = memoryview(mmap.mmap(-1, value_bytes))
    value[:] = np.random.default_rng(0).integers(0, 256, value_bytes, dtype=np.uint8).data
    seen: dict[str, list[tuple[float, float, float, float]]] = {}
    for _ in range(rounds):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        base = plain(place / "plain", value, count)
        os.unlink(place / "plain")
        seen.setdefault("plain", []).append((*base, 1.0, 1.0))
        for arm in ARMS:
            rates = asyncio.run(tier_rates(f"{arm}://{place}/{arm}", value, count))
            seen.setdefault(arm, []).append((*rates, rates[0] / base[0], rates[1] / base[1]))
            shutil.rmtree(place / arm) if (place / arm).is_dir() else os.unlink(place / arm)
    shutil.rmtree(place)
    return {arm: _medians(rows) for arm, rows in seen.items()}


def _medians(rows: list[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
    put, get, put_rel, get_rel = (statistics.median(column) for column in zip(*rows, strict=True))
    return put, get, put_rel, get_rel


def main() -> None:
    mib, count, rounds = [*map(int, sys.argv[2:]), *(8, 32, 5)[len(sys.argv) - 2 :]]
    print(f"{count} values of {mib} MiB, {rounds} rounds: GB/s put, get (cold), relative to plain O_DIRECT put, get")
    for arm, row in measure(Path(sys.argv[1]) / "rates", mib * MIB, count, rounds).items():
        print(f"  {arm:7s} {row[0]:6.2f} {row[1]:6.2f}   {row[2]:5.2f} {row[3]:5.2f}")


if __name__ == "__main__":
    main()
