"""Random saves, loads, damage, losses, pressure and outages: every byte delivered is right, every index is true."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiered_kit import RAW_BYTES, Rig, key, rig

from pdxfer.config.store import TierConfig
from pdxfer.store.events import Batch, Mirror

NAMES = st.integers(0, 11)
TIER = st.integers(0, 2)
FRAME = RAW_BYTES + 160
GIB = 1 << 30


class StoreMachine(RuleBasedStateMachine):
    """Three tiers: memory for 4 values, a write-back disk for 8, a remote. The model: what was ever saved."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.mirror = Mirror()
        self.saved: set[int] = set()
        self.gaps = 0

    @initialize(second_sight=st.booleans(), promote=st.booleans())
    def opened(self, second_sight: bool, promote: bool) -> None:
        tiers = (
            TierConfig(url="dram:", capacity_gib=4 * FRAME / GIB),
            TierConfig(url="disk:", capacity_gib=8 * FRAME / GIB, write="back", promote=promote),
            TierConfig(url="redis:", admit_second_sight=second_sight),
        )
        self.context = rig(*tiers)
        self.rig: Rig = self.runner.run(self.context.__aenter__())
        self.rig.store.subscribe(self.hear)

    def hear(self, batch: Batch) -> None:
        self.gaps += not self.mirror.apply(batch)

    @rule(name=NAMES)
    def save(self, name: int) -> None:
        """What was saved once may be found from then on."""
        self.saved.add(name)
        self.runner.run(self.rig.save(name))

    @rule(name=NAMES)
    def spill(self, name: int) -> None:
        """A reserved save that says it is held can be read back at once."""

        async def spill() -> None:
            [outcome] = await self.rig.save(name, reserved=True)
            if outcome in ("held", "already"):
                self.saved.add(name)
                assert await self.rig.load(name)

        self.runner.run(spill())

    @rule(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def load(self, names: list[int]) -> None:
        """Right bytes (checked by the rig) of chunks that were saved, or nothing."""
        delivered = self.runner.run(self.rig.load(*names))
        assert set(delivered) <= self.saved

    @rule(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def prefetch(self, names: list[int]) -> None:
        """Never more than a prefix of what was saved."""
        count = self.runner.run(self.rig.store.prefetch([key(n) for n in names], "t", self.rig.soon))
        assert set(names[:count]) <= self.saved

    @rule(tier=TIER, name=NAMES)
    def damage(self, tier: int, name: int) -> None:
        """A bit flips where nobody looks."""
        value = self.rig.memory(tier).values.get(key(name))
        if value is not None and not value.leases:
            value.data[-1] ^= 1

    @rule(tier=TIER, down=st.booleans())
    def outage(self, tier: int, down: bool) -> None:
        """A medium that comes and goes."""
        self.rig.tiers[tier].down = down

    @invariant()
    def settled_indexes_are_true(self) -> None:
        """When all is still, listeners know exactly what local tiers hold, and nothing is lent."""
        if hasattr(self, "rig"):
            self.runner.run(self._settled())

    async def _settled(self) -> None:
        await self.rig.settled()
        await self.rig.store.tick()
        await self.rig.settled()
        await self.rig.store.tick()
        self.rig.nothing_is_out()
        assert self.gaps == 0
        for index, name in ((0, "dram"), (1, "disk")):
            assert set(self.rig.store.events.keys(name)) == set(self.rig.memory(index).values), name
            assert self.mirror._tiers.get(name, set()) == set(self.rig.memory(index).values), name

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.runner.run(self.context.__aexit__(None, None, None))
        self.runner.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
