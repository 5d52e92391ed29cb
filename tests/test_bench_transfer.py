"""The transfer bench: ratios are of rounds, and a small run moves real bytes (the arms check each one)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdxfer.bench.transfer import main, summary
from pdxfer.bench.transfer_rig import SHAPES


def test_ratios_are_taken_round_by_round() -> None:
    """A round in which the machine was slow for both says as much as any other."""
    times = {("96k_x1", "memcpy"): [1.0, 10.0, 1.0], ("96k_x1", "local"): [2.0, 20.0, 1.0]}
    found = summary(times, [SHAPES["96k"]])
    assert found["local_vs_memcpy"] == found["local_vs_memcpy_96k_x1"] == 0.5
    assert found["local_vs_memcpy_96k_x1_quartiles"] == "0.50..0.75"
    assert found["nixl_vs_raw"] is None and found["tcp_vs_socket"] is None


def test_the_rate_is_of_prompts_in_a_row() -> None:
    """One prompt alone is shown beside it: waking both sides counts there."""
    times = {("16k_x1", "memcpy"): [1.0], ("16k_x1", "local"): [5.0]}
    times |= {("16k_x4", "memcpy"): [4.0], ("16k_x4", "local"): [5.0]}
    found = summary(times, [SHAPES["16k"], replace(SHAPES["16k"], num_prompts=4)])
    assert (found["local_vs_memcpy"], found["local_vs_memcpy_16k_x1"]) == (0.8, 0.2)


@pytest.mark.slow
def test_a_run_prints_one_object_with_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--reps", "2", "--shapes", "16k", "--prompts", "1,2", "--channels", "tcp,local", "--json"]
    argv += ["--out", str(tmp_path)]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    arms = [row["arm"] for row in found["results"]]
    assert {row["shape"] for row in found["results"]} == {f"{n} x 32 layers of 16 KiB blocks" for n in (1, 2)}
    assert arms[:2] == ["memcpy", "socket"] and {"tcp", "local", "local + digest, verify"} <= set(arms)
    assert found["summary"]["local_vs_memcpy"] > 0 and found["summary"]["tcp_vs_socket"] > 0
    assert (tmp_path / "transfer.json").exists()
