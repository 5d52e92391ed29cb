"""Random put/get/delete by a process that is killed with -9 again and again; `du` watched all the while.

    python tests/disk_campaign.py URL [SECONDS [CAPACITY_MIB]]      e.g. file:///tmp/kv 600 256

After each kill the place is opened here, every value in it is read and compared, and some are deleted. Run by
test_tier_disk_campaign.py for seconds, in the full tier for ten minutes.
"""

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.open import open_tier
from pdxfer.testing.tier_kit import on_pages

MIB = 1 << 20
_LARGEST = 4 * MIB
_BASE = np.random.default_rng(5).integers(0, 256, 6 * MIB, dtype=np.uint8).tobytes()


def campaign_key(number: int) -> bytes:
    """A key from which the number can be read."""
    head = number.to_bytes(8, "little")
    return head + hashlib.sha256(head).digest()[:24]


def campaign_value(number: int, capacity: int) -> list[bytes | memoryview]:
    """Parts of a value that belongs to this number; from a few bytes to a twelfth of the tier, mostly large. Every
    second is one part on whole pages of memory, as chunks of the dram tier are."""
    chance, largest = random.Random(number), min(capacity // 12, _LARGEST)
    size = chance.choice((chance.randrange(1, 5000), chance.randrange(1, largest), largest - chance.randrange(8192)))
    start = chance.randrange(0, len(_BASE) - size)
    parts: list[bytes | memoryview] = [number.to_bytes(8, "little") * 8, memoryview(_BASE)[start : start + size]]
    return [on_pages(b"".join(parts))] if number % 2 else parts


@dataclass(slots=True)
class Report:
    """What a campaign saw."""

    kills: int = 0
    read: int = 0
    """Values read and compared after a kill."""
    wrong: int = 0
    damage: dict[str, int] = field(default_factory=dict)
    """Failures the tier counted when it came back."""
    puts: int = 0
    highest_du: int = 0
    looks: int = 0
    capacity: int = 0
    survivors: list[int] = field(default_factory=list)
    """Values found after each kill."""

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.puts} puts, {self.read} values re-read, {self.wrong} wrong,"
            f" damage {self.damage}; du at most {self.highest_du} of {self.capacity} B in {self.looks} looks"
        )


def disk_usage(place: Path) -> int:
    """The larger of `du -sb` and allocated blocks, of all files of this name or in this directory."""
    own = [place, *place.parent.glob(f"{place.name}[.-]*")]
    paths = [path for root in own for path in ([root, *root.rglob("*")] if root.is_dir() else [root])]
    apparent = allocated = 0
    for path in paths:
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        apparent, allocated = apparent + stat.st_size, allocated + 512 * stat.st_blocks
    return max(apparent, allocated)


class Watch(threading.Thread):
    """Looks at the disk usage without pause until `stop`."""

    def __init__(self, place: Path, report: Report) -> None:
        super().__init__(daemon=True)
        self._place, self._report, self._stopped = place, report, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.002):
            self._report.highest_du = max(self._report.highest_du, disk_usage(self._place))
            self._report.looks += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def run_campaign(url: str, seconds: float, capacity: int, seed: int = 1, kills: int = 1 << 30) -> Report:
    """Until the time is over or so many kills were."""
    chance, report = random.Random(seed), Report(capacity=capacity)
    place = Path(url.split("://")[1])
    watch = Watch(place, report)
    watch.start()
    end = SYSTEM_CLOCK.now() + seconds
    try:
        while SYSTEM_CLOCK.now() < end and report.kills < kills:
            report.puts += _one_life(url, capacity, report.kills, chance)
            report.kills += 1
            asyncio.run(_check(url, capacity, report, chance))
    finally:
        watch.stop()
    return report


def _one_life(url: str, capacity: int, life: int, chance: random.Random) -> int:
    """Start a writer, let it put some values, kill it in the middle; its puts."""
    command = [sys.executable, __file__, "--child", url, str(capacity), str(life)]
    wanted, puts = chance.randrange(1, 120), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        while puts < wanted:
            line = child.stdout.readline()
            assert line, f"the writer ended by itself with {child.wait()}"
            puts += 1
        threading.Event().wait(chance.random() * 0.02)
        child.send_signal(signal.SIGKILL)
    return puts


async def _check(url: str, capacity: int, report: Report, chance: random.Random) -> None:
    """Read everything there is; delete some."""
    tier = await _open(url, capacity)
    entries = await tier.scan(b"", 1 << 20, SYSTEM_CLOCK.now() + 60)
    for entry in entries:
        number = int.from_bytes(entry.key[:8], "little")
        lease = await tier.get(entry.key, SYSTEM_CLOCK.now() + 60)
        if lease is None:
            continue
        async with lease:
            right = entry.key == campaign_key(number) and lease.view == b"".join(campaign_value(number, capacity))
        report.read += 1
        report.wrong += not right
    for reason, times in tier.stats().failures.items():
        report.damage[reason] = report.damage.get(reason, 0) + times
    report.survivors.append(len(entries))
    gone = [entry.key for entry in entries if chance.random() < 0.3]
    assert await tier.delete(gone, SYSTEM_CLOCK.now() + 60) == len(gone)
    await tier.close()


async def _open(url: str, capacity: int) -> Tier:
    return await open_tier(TierConfig(url=url, capacity_gib=capacity / (1 << 30)), SYSTEM_CLOCK)


async def _child(url: str, capacity: int, life: int) -> None:
    """Put, get and delete until killed; one line a put, written before its end is known to anyone."""
    tier = await _open(url, capacity)
    number = (life + 1) << 32
    chance = random.Random(life)

    async def writer() -> None:
        nonlocal number
        while True:
            number += 1
            mine = number
            os.write(1, b".\n")
            outcome = await tier.put(
                campaign_key(mine), campaign_value(mine, capacity), SYSTEM_CLOCK.now() + 60, f"t{mine % 3}"
            )
            assert outcome is Outcome.STORED, outcome
            match chance.randrange(6):
                case 0:
                    await tier.delete([campaign_key(mine - chance.randrange(5))], SYSTEM_CLOCK.now() + 60)
                case 1:
                    lease = await tier.get(campaign_key(mine - chance.randrange(9)), SYSTEM_CLOCK.now() + 60)
                    if lease is not None:
                        lease.release()
                case 2:
                    await tier.pin([campaign_key(mine)], 1.0, SYSTEM_CLOCK.now() + 60)

    await asyncio.gather(*(writer() for _ in range(4)))


def main() -> None:
    if sys.argv[1] == "--child":
        asyncio.run(_child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    seconds, mib = [*sys.argv[2:], *("600", "256")[len(sys.argv) - 2 :]]
    print(run_campaign(sys.argv[1], float(seconds), int(mib) * MIB))


if __name__ == "__main__":
    main()
