"""Who waits for whom at the router: requests of other sizes and models, engines that are not there. Pure."""

import pytest
from test_router_state import PROXY, World, ended, one_pair, sched, worker

from pdxfer.router.events import SetCreditLimit
from pdxfer.wire.messages import Busy, CancelGrant, FromRouter, LegFailed, Local, Pairing, Release, Resume, Started
from pdxfer.wire.version import Decoder, encode


def test_a_model_without_capacity_does_not_hold_up_another_one() -> None:
    """However many of one client's requests wait for it."""
    world = World()
    world.join("a0", "decode", served_names=["a"], fingerprint={"model": "a"})
    world.join("b0", "decode", served_names=["b"], fingerprint={"model": "b"})
    world.beat("a0", "b0", free_blocks=0)
    for number in range(50):
        world.ask(f"a{number}", model="a")
    world.ask("b", model="b")
    world.beat("b0", free_blocks=1000)
    answer = world.answer("b")
    assert isinstance(answer, Local) and answer.decode.engine_id == "b0"
    assert world.answers("a0") == []


def test_the_engine_kept_free_is_one_that_the_waiting_request_would_take() -> None:
    """Not one that no prefill engine reaches: it would be idle, and the request overtaken for ever."""
    world = World(max_bypasses=1)
    world.join("p0", "prefill")
    world.join("d0", "decode")
    world.join("d1", "decode")
    world.connect("p0", "d0")
    world.beat("d0", free_blocks=50)
    world.beat("d1", free_blocks=90)
    world.ask("big", num_tokens=16 * 100 - 1)
    for number in range(2):
        world.ask(f"small{number}", num_tokens=16 * 20 - 1)
    assert isinstance(world.answer("small0"), Pairing) and world.answers("small1") == []
    world.beat("d0", free_blocks=120)
    answer = world.answer("big")
    assert isinstance(answer, Pairing) and answer.decode.engine_id == "d0"


def test_what_never_fits_takes_no_credit_from_others() -> None:
    """The engine refuses it: others need not wait for a heartbeat."""
    world = one_pair()
    world.ask("huge", num_tokens=1_000_000)
    assert isinstance(world.answer("huge"), Local)
    world.ask("next")
    assert isinstance(world.answer("next"), Pairing)


@pytest.mark.parametrize("how", ["suspect", "avoided"])
def test_what_never_fits_is_refused_by_an_engine_that_is_there(how: str) -> None:
    """A dead one would make it 502, and the client would try for ever."""
    world = World()
    world.join("d0", "decode")
    world.join("d1", "decode")
    if how == "suspect":
        for _ in range(4):
            world.tick(0.5)
            world.beat("d1")
    world.ask("huge", num_tokens=1_000_000, avoid=["d0"] if how == "avoided" else [])
    answer = world.answer("huge")
    assert isinstance(answer, Local) and answer.decode.engine_id == "d1"


def test_an_answer_can_be_read_whatever_the_model_was_called() -> None:
    """The proxy would wait for an answer that it could not decode."""
    world = one_pair()
    world.ask("r1", model="\x00" * 1024)
    world.tick(2.1)
    answer = world.answer("r1")
    assert isinstance(answer, Busy)
    decoder: Decoder[FromRouter] = Decoder(FromRouter)  # type: ignore[arg-type]
    assert decoder.decode(encode(answer)) == answer


def test_a_request_that_is_given_up_keeps_nothing_free_and_gets_no_answer() -> None:
    """Its client left while it waited: the engine kept free for it goes to others at once."""
    world = one_pair(max_bypasses=1)
    world.beat("d0", free_blocks=90)
    world.ask("big", num_tokens=16 * 100 - 1)
    for number in range(2):
        world.ask(f"small{number}", num_tokens=16 * 20 - 1)
    assert world.answers("small1") == []
    world.say(PROXY, Release(transfer_id="big", reason="nobody waits for an answer any more"))
    assert isinstance(world.answer("small1"), Pairing)
    world.beat("d0", free_blocks=1000)
    assert world.answers("big") == [] and world.refused("late") == 0


@pytest.mark.parametrize("limit", [None, 100])
def test_no_engine_is_kept_for_a_request_that_it_can_never_take(limit: int | None) -> None:
    """One block of an engine is never free, and an operator may allow fewer: nobody else would be served meanwhile."""
    world = one_pair(max_bypasses=1)
    world.beat("d0", free_blocks=999)
    if limit is not None:
        world.act(world.state.handle(SetCreditLimit(engine_id="d0", num_blocks=limit), world.now))
    world.ask("big", num_tokens=16 * (1000 if limit is None else 101) - 1, deadline_s=1.0)
    for number in range(4):
        world.ask(f"small{number}", num_tokens=16 * 20 - 1)
        world.beat("d0", free_blocks=999)
        assert isinstance(world.answer(f"small{number}"), Pairing)
    if limit is None:
        assert isinstance(world.answer("big"), Local)
        return
    world.tick(1.1)
    answer = world.answer("big")
    assert isinstance(answer, Busy) and "credit limit" in answer.reason


@pytest.mark.parametrize("how", ["lost", "over", "unknown", "moved"])
def test_a_prefill_that_begins_too_late_is_told_so(how: str) -> None:
    """It was away when its pairing went on without it: it would hold the prompt's blocks until its deadline."""
    world = one_pair()
    world.ask()
    if how == "lost":
        world.say(PROXY, LegFailed(transfer_id="t-1", leg="prefill", reason="no answer", epoch=1))
    elif how == "over":
        world.say(sched("d0"), ended("t-1"))
    elif how == "moved":
        world.join("p1", "prefill")
        world.connect("p1", "d0")
        resume = Resume(transfer_id="t-1", epoch=2, first_missing=0, num_missing_tokens=900, reason="lost")
        world.say(sched("d0"), resume)
    world.sent.clear()
    transfer_id = "t-9" if how == "unknown" else "t-1"
    world.say(sched("p0"), Started(transfer_id=transfer_id, num_tokens=1000))
    told = [message.transfer_id for message in world.to(sched("p0"), CancelGrant)]
    assert told == [transfer_id] and len(world.to(worker("p0"), CancelGrant)) == 1
    assert world.to(sched("d0"), Started) == []
