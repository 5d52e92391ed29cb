"""The DRAM tier's use of memory over time: values of all sizes come, are read and evicted, the process does not grow.

In a process of its own, so that nobody else's memory is counted:  python tests/test_tier_dram_flat.py ROUNDS
"""

import asyncio
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome
from pdxfer.store.dram import DramTier
from pdxfer.testing.tier_kit import MIB, key_of

CAPACITY_BYTES = 48 * MIB
LARGEST = 3 * MIB
LOOKS = 40
GROWTH_BYTES = 4 * MIB
"""Allowed after the warm-up: the interpreter's own memory comes in steps of a MiB."""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_memory_is_flat_while_values_come_and_go(rounds: int) -> None:
    """Resident and mapped bytes at the end of the warm-up (a quarter of the rounds) are what they are ever after."""
    child = subprocess.run([sys.executable, __file__, str(rounds)], capture_output=True, timeout=1800, check=False)
    assert child.returncode == 0, child.stderr.decode()
    said = json.loads(child.stdout)
    assert said["evictions"] > rounds / 4 and said["hits"] > rounds / 20 and said["hits"] + said["misses"] > rounds / 4
    for what in ("resident", "mapped"):
        looks = said[what][LOOKS // 4 :]
        assert max(looks) - looks[0] <= GROWTH_BYTES, (what, said[what])


async def _run(rounds: int) -> dict[str, object]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # a second thread late would map its stack
    tier = DramTier(TierConfig(url="dram:", capacity_gib=CAPACITY_BYTES / (1 << 30)), SYSTEM_CLOCK)
    await tier.open()
    chance, process = random.Random(3), psutil.Process()
    base = memoryview(np.random.default_rng(3).integers(0, 256, LARGEST, dtype=np.uint8).data)
    sizes: dict[int, int] = {}
    resident, mapped = [], []
    for number in range(rounds):
        sizes[number] = chance.choice((chance.randrange(4096), chance.randrange(MIB), chance.randrange(LARGEST)))
        outcome = await tier.put(key_of(number), [base[: sizes[number]]], SYSTEM_CLOCK.now() + 60)
        assert outcome is Outcome.STORED, outcome
        asked = chance.randrange(max(0, number - 200), number + 1)
        lease = await tier.get(key_of(asked), SYSTEM_CLOCK.now() + 60)
        if lease is not None:
            async with lease:
                assert len(lease.view) == sizes[asked] and lease.view[-64:] == base[: sizes[asked]][-64:]
        if chance.random() < 0.1:
            await tier.delete([key_of(asked)], SYSTEM_CLOCK.now() + 60)
        sizes.pop(number - 200, None)
        if number % (rounds // LOOKS) == rounds // LOOKS - 1:
            tier.take_evicted()  # as the store does, ten times a second
            memory = process.memory_info()
            resident.append(memory.rss)
            mapped.append(memory.vms)
    tier.check()
    stats = tier.stats()
    await tier.close()
    counts = {"evictions": stats.evictions, "hits": stats.hits, "misses": stats.misses}
    return {**counts, "resident": resident, "mapped": mapped}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(int(sys.argv[1])))))
