"""The lmdb tier keeps every promise of tiers, its capacity as du sees it, and its values through kill -9."""

from pathlib import Path

import lmdb
import pytest

from pdxfer.store.base import Tier
from pdxfer.store.disk_index import Record
from pdxfer.store.lmdb_tier import LmdbMedium, LmdbTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Wanted, key_of
from pdxfer.testing.tier_suite import TierSuite


@pytest.mark.slow
class TestLmdbTier(TierSuite):
    survives_restart = True
    capacity_bytes = 24 * MIB

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return LmdbTier(wanted.config(f"lmdb://{where}/kv"), clock, **wanted.limits())


def test_what_lmdb_says_of_the_disk_is_the_disks_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bug of ours."""
    medium = LmdbMedium(f"{tmp_path}/kv", 8 * MIB, durable=False)
    medium.open()
    try:

        def fails(record: Record, view: memoryview) -> None:
            raise lmdb.DiskError("No space left on device")

        monkeypatch.setattr(medium, "_put_once", fails)
        block = memoryview(bytearray(4096))
        with pytest.raises(OSError, match="No space left"):
            medium.write(Record(key=key_of("a"), num_bytes=4096), block, ())
    finally:
        medium.close()
