"""The router bench runs, small, and prints the object that others read."""

import json
from pathlib import Path

import pytest

from pdxfer.bench.router import main


@pytest.mark.slow
def test_a_small_run_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys as documented; the file equals what was printed; every question was answered with a pair."""
    args = ["--engines", "4", "--seconds", "0.3", "--rate", "100", "--json", "--out", str(tmp_path), "--keys"]
    assert main(args) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["command", "machine", "versions", "results", "summary"]
    assert set(printed["summary"]) == {
        "pairings_per_s", "transfers_per_s", "p99_ms_4_engines", "p99_ms_beats_at_once",
    }  # fmt: skip
    assert printed == json.loads((tmp_path / "router.json").read_text())
    assert all(row["pairings_per_s"] > 0 for row in printed["results"])
