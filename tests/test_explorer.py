"""Whole transfers under seeded faults: the invariants hold in every schedule, and each broken rule is caught."""

from typing import Any

import pytest

from pdxfer.connector.transfer import Receive
from pdxfer.router.credits import Credit
from pdxfer.router.leases import Leases
from pdxfer.testing import explorer
from pdxfer.testing.sim_decode import SimDecode
from pdxfer.testing.sim_prefill import SimPrefill
from pdxfer.testing.sim_receiver import SimReceiver

FAST, MANY = 300, 20_000


def _check(found: explorer.Summary) -> None:
    told = [f"seed {outcome.seed}: {outcome.problems[0]}" for outcome in found.failing]
    assert not told, f"{told}; replay with: python -m pdxfer.testing.explorer --seed {found.failing[0].seed} --trace"


def test_every_schedule_keeps_the_invariants() -> None:
    """Losses, repeats, delays, corruption, crashes, hangs, partitions, cuts: all occur, nothing is wrong."""
    found = explorer.explore(range(FAST))
    _check(found)
    assert found.num_delivered > FAST / 3, "most transfers failed: the schedules prove little"
    assert found.num_resumed > FAST / 30, "hardly any transfer was resumed"
    assert found.ends["ok"] > sum(found.ends.values()) * 0.8
    kinds = {"lost", "corrupt", "duplicated", "delayed", "crash", "hang", "partition", "cut", "abort"}
    assert kinds <= found.faults.keys()


@pytest.mark.slow
def test_twenty_thousand_schedules_keep_the_invariants() -> None:
    """The campaign of CI; `python -m pdxfer.testing.explorer --seed 20000 --count N` goes on from there."""
    found = explorer.explore(range(FAST, FAST + MANY))
    _check(found)
    assert found.num_schedules == MANY


def test_a_seed_replays() -> None:
    """Twice the same schedule, to the last message."""
    traces: list[list[str]] = [[], []]
    outcomes = [explorer.run(7, trace.append) for trace in traces]
    assert outcomes[0] == outcomes[1] and traces[0] == traces[1] and traces[0]


def test_the_command_prints_a_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--seed N --trace` shows each message."""
    monkeypatch.setattr("sys.argv", ["explorer", "--seed", "3", "--trace"])
    assert explorer.main() == 0
    assert "→ router: Pair" in capsys.readouterr().out


# ---- each broken rule is caught ----------------------------------------------------------------------------------


def _caught(text: str, num_schedules: int = 1500) -> None:
    """Some schedule fails with this."""
    for seed in range(num_schedules):
        try:
            problems = explorer.run(seed).problems
        except (AssertionError, KeyError) as error:  # the machines' own assertions see it first
            problems = (repr(error),)
        if any(text in problem for problem in problems):
            return
    raise AssertionError(f"nobody noticed within {num_schedules} schedules")


def test_a_fence_that_fences_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fenced is reported, the posted writes stay."""
    monkeypatch.setattr(SimReceiver, "fence", lambda self, channel: None)
    _caught("a late byte")


def test_a_late_byte_of_an_epoch_that_is_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the request's own blocks, which another prefill or decode itself fills by now."""
    monkeypatch.setattr(SimReceiver, "fence", lambda self, channel: None)
    outcomes = (explorer.run(seed) for seed in range(550, 1150))
    assert any("a late byte of epoch" in problem for outcome in outcomes for problem in outcome.problems)


def test_reporting_before_the_drain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fence first, report second: the other way round."""

    def revoke(self: SimReceiver, key: Any, reason: str) -> None:
        if key in self.incoming:
            self.incoming[key].revoked = reason
            self.fenced(key)

    monkeypatch.setattr(SimReceiver, "revoke", revoke)
    _caught("a late byte")


def test_blocks_of_an_aborted_request_given_back_at_once_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abandoned receive that calls itself quiet is no quarantine."""
    monkeypatch.setattr(Receive, "quiet", property(lambda self: True))
    _caught("a late byte")


def test_a_source_without_a_gate_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks go back while writes are posted."""
    settle = SimPrefill._settle

    def ungated(self: SimPrefill, one: Any) -> None:
        if one.send.ending:
            one.flying.clear()
        settle(self, one)

    monkeypatch.setattr(SimPrefill, "_settle", ungated)
    _caught("was reused while")


def test_a_unit_that_nobody_verifies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimReceiver, "_verify", lambda self, write: True)
    _caught("corrupt")


def test_a_verdict_that_calls_bad_blocks_good_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receive, "num_valid", property(lambda self: len(self.block_ids)))
    _caught(" reads ")


def test_a_lease_that_never_expires_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "expired", lambda self, now: [])
    _caught("leases and")


def test_a_credit_that_is_not_returned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Credit, "settle", lambda self, key, since: None)
    _caught("blocks reserved")


def test_a_credit_returned_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: Credit, key: str) -> None:
        self._sum -= 2 * self._reserved.pop(key, 0)
        self._settled.pop(key, None)

    monkeypatch.setattr(Credit, "release", release)
    _caught("does not add up")


def test_blocks_freed_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = SimDecode._forget

    def twice(self: SimDecode, leg_id: str, job: Any) -> None:
        self.give(list(job.blocks))
        forget(self, leg_id, job)

    monkeypatch.setattr(SimDecode, "_forget", twice)
    _caught("freed twice")


def test_a_grant_that_names_no_generation_is_caught() -> None:
    """Overtaken by a fence and a new channel, it fills blocks that were given to others."""
    outcomes = (explorer.run(seed, grants_name_generation=False) for seed in range(4500, 5100))
    assert any("a late byte" in problem for outcome in outcomes for problem in outcome.problems)
