"""The router's part of a resume: another prefill takes over, and what the first one still says does not count."""

from test_router_state import PROXY, World, ended, grant, one_pair, sched, worker

from pdxfer.router.events import Unreachable
from pdxfer.wire.messages import CancelGrant, Grant, LegFailed, Redispatch, Resume, Started


def resume(epoch: int = 2, num_missing_tokens: int = 900, transfer_id: str = "t-1") -> Resume:
    return Resume(
        transfer_id=transfer_id, epoch=epoch, first_missing=6, num_missing_tokens=num_missing_tokens, reason="peer lost"
    )


def two_prefills() -> World:
    """t-1 is paired with p0, and granted; p1 could take over."""
    world = one_pair()
    world.join("p1", "prefill")
    world.connect("p1", "d0")
    world.ask()
    world.say(sched("p0"), Started(transfer_id="t-1", num_tokens=1000))
    world.say(sched("d0"), grant("t-1"))
    world.sent.clear()
    return world


def test_another_prefill_takes_over_from_the_first_missing_block() -> None:
    """The proxy sends the leg there, the first engine is told to stop, the load moves with the pairing."""
    world = two_prefills()
    world.say(sched("d0"), resume())
    (redispatch,) = world.to(PROXY, Redispatch)
    assert (redispatch.prefill.engine_id, redispatch.epoch, redispatch.first_missing) == ("p1", 2, 6)
    assert len(world.to(worker("p0"), CancelGrant)) == 1 and not world.to(worker("p1"), CancelGrant)
    engines = world.state.cluster.engines
    assert (engines["p0"].outstanding_tokens, engines["p1"].outstanding_tokens) == (0, 1000)
    assert not world.state.leases.of_engine("p0") and world.state.leases.of_engine("p1")
    assert world.kinds[-1] == "resumed"
    world.say(sched("p1"), Started(transfer_id="t-1", num_tokens=1000))
    (started,) = world.to(sched("d0"), Started)
    assert (started.prefill_id, started.epoch) == ("p1", 2)
    world.say(sched("d0"), grant("t-1", epoch=2))
    assert [message.epoch for message in world.to(worker("p1"), Grant)] == [2]
    world.say(sched("d0"), ended("t-1"))
    assert engines["p1"].outstanding_tokens == 0 and not len(world.state.leases)


def test_words_of_an_attempt_that_is_over_do_not_reach_the_next_one() -> None:
    """Late, repeated or overtaken: grants, cancels, failures and starts of epoch 1."""
    world = two_prefills()
    world.say(sched("d0"), resume())
    world.sent.clear()
    world.say(sched("d0"), grant("t-1"), CancelGrant(transfer_id="t-1", reason="given up"), resume())
    world.say(PROXY, LegFailed(transfer_id="t-1", leg="prefill", reason="reset"))
    world.say(sched("p0"), Started(transfer_id="t-1", num_tokens=1000))
    world.say(sched("p0"), LegFailed(transfer_id="t-1", leg="prefill", reason="no channel"))
    assert {(route, type(message)) for route, message in world.sent} == {
        (worker("p0"), CancelGrant),
        (sched("p0"), CancelGrant),
    }
    assert (world.refused("stale"), world.refused("foreign")) == (4, 2)


def test_the_loss_of_the_second_prefill_is_told_with_its_epoch() -> None:
    world = two_prefills()
    world.say(sched("d0"), resume())
    world.say(PROXY, LegFailed(transfer_id="t-1", leg="prefill", reason="reset", epoch=2))
    (failed,) = world.to(sched("d0"), LegFailed)
    assert (failed.leg, failed.epoch) == ("prefill", 2)


def test_without_another_prefill_decode_is_told_at_once() -> None:
    """None is there; or both have been tried; or the pairing is over."""
    world = one_pair()
    world.ask()
    world.say(sched("d0"), grant("t-1"), resume())
    (failed,) = world.to(sched("d0"), LegFailed)
    assert failed.epoch == 2 and "no other prefill engine" in failed.reason and not world.to(PROXY, Redispatch)
    world = two_prefills()
    world.say(sched("d0"), resume(), resume(epoch=3))
    assert [message.epoch for message in world.to(sched("d0"), LegFailed)] == [3]
    world.say(sched("d0"), ended("t-1"), resume(epoch=4))
    assert "the pairing has ended" in world.to(sched("d0"), LegFailed)[-1].reason


def test_a_short_rest_is_not_worth_another_prefill() -> None:
    """Below router.min_remote_tokens decode computes it sooner."""
    world = two_prefills()
    world.say(sched("d0"), resume(num_missing_tokens=100))
    assert world.to(sched("d0"), LegFailed) and not world.to(PROXY, Redispatch)


def test_a_suspect_prefill_is_not_asked_to_take_over() -> None:
    world = two_prefills()
    world.act(world.state.handle(Unreachable(sched("p1")), world.now))
    assert world.kinds[-1] == "suspect"
    world.say(sched("d0"), resume())
    assert world.to(sched("d0"), LegFailed) and not world.to(PROXY, Redispatch)


def test_only_the_decode_leg_may_ask() -> None:
    world = two_prefills()
    world.join("d1", "decode")
    world.sent.clear()
    world.say(sched("d1"), resume())
    world.say(sched("p0"), resume())
    assert not world.to(PROXY, Redispatch)
