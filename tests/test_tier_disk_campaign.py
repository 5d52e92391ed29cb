"""kill -9 campaigns with `du` watched, on real files; see disk_campaign.py."""

from pathlib import Path

import pytest
from disk_campaign import MIB, Report, run_campaign

KINDS = ("file", "lmdb", "sqlite")


def check(report: Report) -> None:
    """No wrong byte, no damage by a kill, never above the limit, and something was really there."""
    print(report)
    assert report.wrong == 0 and report.damage == {}
    assert 0 < report.highest_du <= report.capacity
    assert report.read > 0 and sum(report.survivors) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_some_kills(tmp_path: Path, kind: str) -> None:
    report = run_campaign(f"{kind}://{tmp_path}/kv", seconds=8.0 if kind == "file" else 4.0, capacity=32 * MIB)
    check(report)
    assert report.kills >= 2


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_ten_minutes_of_kills(tmp_path: Path, kind: str) -> None:
    seconds = 600.0 if kind == "file" else 120.0
    check(run_campaign(f"{kind}://{tmp_path}/kv", seconds=seconds, capacity=256 * MIB))
