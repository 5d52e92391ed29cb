"""kill -9 while the store saves: what a tier had said is there after the restart, and nothing else is served."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiered_kit import IDENTITY, Rig, key

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.open import open_tiers
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.faulty_tier import FaultyTier

SIZE = 200_000
CHILD = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_tiered_restart import SIZE, opened

async def main():
    rig = await opened(sys.argv[2], sys.argv[3])
    for name in range(int(sys.argv[4]), 1 << 30):
        await rig.saved(name, size=SIZE)
        print(name, flush=True)

asyncio.run(main())
"""


async def opened(where: str, codec: str) -> Rig:
    """Memory over disk, as an engine has them."""
    disk = TierConfig(url=f"file://{where}/slab", capacity_gib=0.25, codec=codec)
    config = StoreConfig(tiers=[TierConfig(url="dram:", capacity_gib=0.03125), disk])
    tiers = await open_tiers(config, SYSTEM_CLOCK)
    store = TieredStore(tiers, config, IDENTITY)
    await store.open()
    return Rig(store, [FaultyTier(tier) for tier in tiers])


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_what_was_stored_is_there_after_kill_9(tmp_path: Path, codec: str) -> None:
    """Four lives of a process, each killed at a random moment; the mirror lists what the disk has."""
    rng, said = random.Random(3), list[int]()
    for _ in range(4):
        first = max(said, default=-1) + 1000
        command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path), codec, str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(rng.randrange(5, 25)):
                said.append(int(child.stdout.readline()))
            child.send_signal(signal.SIGKILL)
            said += [int(line) for line in child.stdout.read().splitlines()]
        assert child.returncode == -signal.SIGKILL
        r = await opened(str(tmp_path), codec)
        try:
            assert {key(name) for name in said} <= set(r.store.events.keys("disk"))
            assert await r.load(*said, size=SIZE) == dict.fromkeys(said, "disk")
            last = [max(said) + 1, max(said) + 2]
            assert set(await r.load(*last, size=SIZE)) <= set(last), "half saved: whole or not at all"
            await r.settled()
            r.nothing_is_out()
        finally:
            await r.store.close(r.soon)
