"""The transfer machines: exactly one report for every receive, references back only when all ranks are quiet."""

import pytest

from pdxfer.connector.transfer import Receive, ReceiveState, Send


def receive(world_size: int = 1) -> Receive:
    return Receive(request_id="r", transfer_id="t", num_tokens=300, world_size=world_size, deadline=10.0)


def granted(world_size: int = 1) -> Receive:
    machine = receive(world_size)
    machine.started("p0")
    machine.granted(0, [5, 6, 7])
    return machine


def test_a_receive_lands_when_every_rank_has() -> None:
    machine = granted(world_size=2)
    machine.rank_landed(0)
    assert machine.state is ReceiveState.GRANTED
    machine.rank_landed(1)
    assert machine.state is ReceiveState.LANDED and machine.quiet


def test_a_leg_failure_before_the_grant_means_local_compute() -> None:
    machine = receive()
    assert machine.give_up("prefill leg failed") is False
    assert machine.state is ReceiveState.LOCAL


def test_a_leg_failure_after_the_grant_revokes_first_and_keeps_what_landed() -> None:
    machine = granted(world_size=2)
    assert machine.give_up("prefill died") is True
    assert not machine.quiet
    machine.rank_fenced(0, 2, "prefill died")
    assert machine.state is ReceiveState.REVOKING
    machine.rank_fenced(1, 1, "prefill died")
    assert machine.state is ReceiveState.FENCED
    assert machine.invalid_blocks == [6, 7]


def test_one_fenced_rank_asks_the_others_to_revoke_once() -> None:
    machine = granted(world_size=2)
    assert machine.rank_fenced(0, 0, "digest") is True
    assert machine.rank_fenced(1, 3, "digest") is False
    assert machine.invalid_blocks == [5, 6, 7]


def test_a_rank_that_landed_while_another_was_fenced_counts_as_quiet() -> None:
    machine = granted(world_size=2)
    machine.rank_landed(1)
    machine.rank_fenced(0, 1, "lost")
    assert machine.state is ReceiveState.FENCED and machine.num_valid == 1


def test_units_that_all_landed_during_a_revoke_are_kept() -> None:
    machine = granted()
    machine.give_up("deadline")
    machine.rank_fenced(0, 3, "deadline")
    assert machine.state is ReceiveState.LANDED


@pytest.mark.parametrize("prepare", [lambda m: None, lambda m: m.started("p")])
def test_an_abort_before_the_grant_needs_no_report(prepare) -> None:  # type: ignore[no-untyped-def]
    machine = receive()
    prepare(machine)
    assert machine.over() is False


def test_an_abort_with_the_grant_out_is_reported_at_once_and_quiet_later() -> None:
    machine = granted()
    assert machine.over() is True
    assert machine.abandoned and not machine.quiet
    machine.give_up("request over")
    machine.rank_fenced(0, 1, "request over")
    assert machine.quiet


def test_messages_after_the_end_change_nothing() -> None:
    machine = granted()
    machine.rank_landed(0)
    machine.state = ReceiveState.REPORTED
    machine.rank_landed(0)
    assert machine.rank_fenced(0, 0, "late") is False
    assert machine.give_up("late") is False
    assert machine.state is ReceiveState.REPORTED


def send() -> Send:
    return Send(
        request_id="r", transfer_id="t", num_tokens=300, total_blocks=3, token_digest=b"", world_size=2, deadline=1.0
    )


@pytest.mark.parametrize(("end", "blocks"), [(1, 0), (127, 0), (128, 1), (256, 2), (299, 2), (300, 3)])
def test_a_block_is_planned_when_its_last_token_is_computed(end: int, blocks: int) -> None:
    assert send().plan_to(end, 128) == blocks


def test_a_send_settles_with_its_last_rank_and_remembers_a_failure() -> None:
    machine = send()
    machine.rank_settled(0, False)
    assert not machine.is_settled
    machine.rank_settled(1, True)
    assert machine.is_settled and not machine.delivered


def fenced(num_valid: int = 1) -> Receive:
    """A transfer whose prefill was lost after so many blocks had landed."""
    machine = granted()
    machine.rank_fenced(0, num_valid, "peer lost")
    assert machine.state is ReceiveState.FENCED
    return machine


def test_a_resume_keeps_what_landed_and_waits_for_another_prefill() -> None:
    """Under the next epoch: the wire has to bring only what is missing."""
    machine = fenced()
    assert machine.is_resumable
    machine.resume(5.0)
    assert (machine.state, machine.epoch, machine.num_good) == (ReceiveState.RESUMING, 2, 1)
    assert machine.resumed("p1", 2) and machine.state is ReceiveState.GRANTED
    assert machine.wire is not None and (machine.wire.at, machine.wire.count) == (1, 2)
    machine.rank_landed(0)
    assert machine.state is ReceiveState.LANDED and machine.invalid_blocks == []


def test_a_start_of_another_epoch_resumes_nothing() -> None:
    machine = fenced()
    assert not machine.resumed("p0", 1)
    machine.resume(5.0)
    assert not machine.resumed("p0", 1) and not machine.resumed("p1", 3)
    machine.started("p0")
    assert machine.state is ReceiveState.RESUMING


def test_a_resume_that_nobody_takes_is_fenced_as_it_was() -> None:
    """Nothing is out: no revoke, and the verdict names what never landed."""
    machine = fenced()
    machine.resume(5.0)
    assert machine.give_up("no other prefill") is False
    assert machine.state is ReceiveState.FENCED and machine.invalid_blocks == [6, 7]


def test_a_second_prefill_that_fails_too_leaves_the_good_blocks_of_both() -> None:
    machine = fenced()
    machine.resume(5.0)
    machine.resumed("p1", 2)
    machine.rank_fenced(0, 1, "peer lost")
    assert machine.state is ReceiveState.FENCED and machine.invalid_blocks == [7]


def test_an_abort_while_another_prefill_is_waited_for_is_reported_and_quiet_at_once() -> None:
    machine = fenced()
    machine.resume(5.0)
    assert machine.over() is True
    assert machine.quiet and not machine.resumed("p1", 2)


def test_only_a_wire_that_failed_is_resumed() -> None:
    """Not an abandoned receive, not a load, not one whose store part is what is missing."""
    abandoned = granted()
    abandoned.over()
    abandoned.rank_fenced(0, 1, "peer lost")
    assert not abandoned.is_resumable
    short = receive()
    short.started("p0")
    short.granted(0, [5, 6, 7], 2)
    short.rank_loaded(0, 1, "chunk missing")
    short.rank_fenced(0, 0, "chunk missing")
    assert short.state is ReceiveState.FENCED and not short.is_resumable
