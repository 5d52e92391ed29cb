"""Resume in the scheduler half: direct → store → another prefill → recompute, in that order, once, in time.

As tests/test_store_halves.py, with its fakes of what we read of vLLM.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from test_store_halves import Engine, paired, prompt

from pdxfer.node.recompute import CHEAPER
from pdxfer.wire.halves import Expect, Fenced, Landed
from pdxfer.wire.messages import CancelGrant, Ended, Grant, LegFailed, Resume, Started

pytestmark = pytest.mark.slow

TABLE = [1, 2, 3, 4, 5, 6, 7]


def said(engine: Engine, kind: type) -> list[Any]:
    """To the router."""
    return [message for message in engine.member.router if isinstance(message, kind)]


def fenced(epoch: int = 1, num_valid: int = 2) -> Fenced:
    return Fenced(
        rank=0, transfer_id="t", epoch=epoch, num_valid=num_valid, reason="peer lost", num_units=2, num_bytes=200
    )


def hopeless() -> Fenced:
    return Fenced(rank=0, transfer_id="t", epoch=1, num_valid=2, reason=f"p0: {CHEAPER}: 9 s")


def granted() -> tuple[Engine, Any]:
    """100 tokens in 7 blocks, granted to p0; nothing is stored."""
    engine, request = Engine(), prompt(100)
    engine.store.grid.identities.clear()
    receive = paired(engine, request)
    assert engine.ask(request) == (100, True)
    engine.allocate(request, TABLE, 100)
    return engine, receive


def verdicts(engine: Engine) -> tuple[int, ...]:
    output: Any = SimpleNamespace(num_scheduled_tokens={})
    return engine.receives.take_verdicts(output)


def test_a_lost_prefill_is_replaced_and_only_what_is_missing_is_granted_again() -> None:
    engine, receive = granted()
    engine.receives.rank_fenced(receive, fenced())
    (resume,) = said(engine, Resume)
    assert (resume.epoch, resume.first_missing, resume.num_missing_tokens) == (2, 2, 68)
    assert [cancel.epoch for cancel in said(engine, CancelGrant)] == [1]
    assert verdicts(engine) == () and engine.report() == set(), "vLLM hears nothing of it"
    engine.receives.started(receive, Started(transfer_id="t", num_tokens=100, prefill_id="p1", epoch=2))
    expect, grant = engine.member.of(Expect)[-1], said(engine, Grant)[-1]
    assert (expect.epoch, expect.prefill_id, expect.first_block, expect.block_ids) == (2, "p1", 2, [3, 4, 5, 6, 7])
    assert (grant.epoch, grant.first_block, grant.block_ids) == (2, 2, [3, 4, 5, 6, 7])
    assert grant.token_digest == said(engine, Grant)[0].token_digest
    landed = Landed(rank=0, transfer_id="t", epoch=2, num_units=5, num_bytes=500, channel="tcp", wall=0.0)
    engine.receives.rank_landed(receive, landed)
    assert engine.report() == {"r"}
    (over,) = said(engine, Ended)
    assert (over.outcome, over.num_tokens, over.num_units, over.num_bytes) == ("delivered", 100, 7, 700)
    assert engine.receives.counters["resumed_transfers"] == 1


def test_facts_and_failures_of_an_epoch_that_is_over_change_nothing() -> None:
    engine, receive = granted()
    engine.receives.rank_fenced(receive, fenced())
    engine.receives.leg_failed(receive, LegFailed(transfer_id="t", leg="prefill", reason="late", epoch=1))
    engine.receives.started(receive, Started(transfer_id="t", num_tokens=100, prefill_id="p0", epoch=1))
    engine.receives.started(receive, Started(transfer_id="t", num_tokens=100, prefill_id="p1", epoch=2))
    engine.receives.leg_failed(receive, LegFailed(transfer_id="t", leg="prefill", reason="late", epoch=1))
    late = Landed(rank=0, transfer_id="t", epoch=1, num_units=5, num_bytes=500, channel="tcp", wall=0.0)
    engine.receives.rank_landed(receive, late)
    engine.receives.rank_fenced(receive, fenced(num_valid=0))
    assert receive.prefill_id == "p1" and engine.report() == set() and len(said(engine, Grant)) == 2


def test_when_there_is_no_other_prefill_the_rest_is_computed() -> None:
    engine, receive = granted()
    engine.receives.rank_fenced(receive, fenced())
    engine.receives.leg_failed(receive, LegFailed(transfer_id="t", leg="prefill", reason="none", epoch=2))
    verdict = verdicts(engine)
    assert verdict == (3, 4, 5, 6, 7) and engine.report(*verdict) == {"r"}
    assert [over.outcome for over in said(engine, Ended)] == ["failed"]


def test_another_prefill_has_half_of_what_is_left_of_the_deadline_to_start() -> None:
    engine, receive = granted()
    engine.clock.advance(20.0)
    engine.receives.rank_fenced(receive, fenced())
    engine.clock.advance(19.0)
    engine.receives.check_deadlines(engine.clock.now())
    assert verdicts(engine) == ()
    engine.clock.advance(1.0)
    engine.receives.check_deadlines(engine.clock.now())
    assert verdicts(engine) == (3, 4, 5, 6, 7)


def test_a_transfer_is_resumed_once() -> None:
    engine, receive = granted()
    engine.receives.rank_fenced(receive, fenced())
    engine.receives.started(receive, Started(transfer_id="t", num_tokens=100, prefill_id="p1", epoch=2))
    engine.receives.rank_fenced(receive, fenced(epoch=2, num_valid=1))
    assert len(said(engine, Resume)) == 1 and verdicts(engine) == (4, 5, 6, 7)


def test_past_its_deadline_or_without_a_router_a_transfer_is_not_resumed() -> None:
    engine, receive = granted()
    engine.clock.advance(60.0)
    engine.receives.rank_fenced(receive, fenced())
    assert not said(engine, Resume) and verdicts(engine)
    engine, receive = granted()
    engine.member.is_connected = False  # type: ignore[misc]
    engine.receives.rank_fenced(receive, fenced())
    assert not said(engine, Resume) and verdicts(engine)


def test_a_router_lost_meanwhile_ends_the_wait() -> None:
    engine, receive = granted()
    engine.receives.rank_fenced(receive, fenced())
    engine.receives.router_lost(engine.clock.now())
    engine.receives.check_deadlines(engine.clock.now())
    assert verdicts(engine) == (3, 4, 5, 6, 7)


def test_an_abort_while_another_prefill_is_waited_for_ends_it_at_once() -> None:
    engine, receive = granted()
    engine.receives.rank_fenced(receive, fenced())
    request: Any = SimpleNamespace(request_id=receive.request_id)
    assert engine.receives.request_over(request)
    assert engine.report() == {"r"} and not engine.receives.unsettled
    assert [over.outcome for over in said(engine, Ended)] == ["aborted"]
    assert said(engine, CancelGrant)[-1].epoch == 2 and not engine.pool.held


def test_what_was_given_up_for_being_slow_is_computed_not_sent_by_another_prefill() -> None:
    """Whether the prefill's own word comes first, or the router's that its leg is over."""
    engine, receive = granted()
    engine.receives.rank_fenced(receive, hopeless())
    assert said(engine, Resume) == [] and verdicts(engine) == (3, 4, 5, 6, 7)
    engine, receive = granted()
    engine.receives.leg_failed(receive, LegFailed(transfer_id="t", leg="prefill", reason=f"{CHEAPER}: 9 s", epoch=1))
    engine.receives.rank_fenced(receive, hopeless())
    assert said(engine, Resume) == [] and verdicts(engine) == (3, 4, 5, 6, 7)
