"""The store bench: it runs, checks its bytes, and leaves the object that all benches leave."""

import json
from pathlib import Path

import pytest

from pdxfer.cli import main


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory and disk at one size."""
    args = ["--only", "dram,disk", "--dir", str(tmp_path), "--mib", "1", "--reps", "1", "--sizes", "96KiB", "--json"]
    assert main.run(["bench", "store", *args, "--out", str(tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"].startswith("pdxfer bench store --only dram,disk")
    assert {(row["tier"], row["arm"]) for row in printed["results"]} == {
        ("dram", "pdxfer"), ("dram", "reference"), ("dram", "memcpy"), ("disk", "pdxfer"), ("disk", "reference"),
        ("disk", "reference, huge pages"),
    }  # fmt: skip
    for key in ("dram_put_rel", "dram_get_rel", "disk_put_rel", "disk_get_rel", "dram_put_rel_96KiB"):
        assert printed["summary"][key] > 0
    assert json.loads((tmp_path / "out" / "store.json").read_text()) == printed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    for args in (["--sizes", "1KiB"], ["--tier", "redis"], ["--only", "nothing"], ["--reps", "0"]):
        assert main.run(["bench", "store", *args]) == 2
    assert "NAME=URL" in capsys.readouterr().err
