"""What the router keeps of members: channels to engines that left, roles that flip, clocks that step. Pure."""

import pytest
from router_kit import FINGERPRINT
from test_router_state import PROXY, World, one_pair, sched, worker

from pdxfer.controller.board import health
from pdxfer.core.errors import ConfigError
from pdxfer.router.events import SetRole
from pdxfer.router.settings import RouterSettings
from pdxfer.wire.messages import Goodbye, Heartbeat, Local, PeerReady, Peers, Role, Stamp


def closed(engine_id: str) -> PeerReady:
    return PeerReady(engine_id=engine_id, incarnation=1, kind="", reason="tcp: the peer closed it")


@pytest.mark.parametrize("last_word", ["before", "after"])
def test_an_engine_that_left_is_nobodys_closed_channel(last_word: str) -> None:
    """Or its partners would be ill for ever, and the cluster never clean."""
    world = one_pair()
    world.join("d1", "decode")
    world.connect("p0", "d1")
    if last_word == "before":
        world.say(worker("p0"), closed("d1"))
    world.say(sched("d1"), Goodbye(reason="scaled down"))
    if last_word == "after":
        world.say(worker("p0"), closed("d1"))
    engines = {engine.engine_id: engine for engine in world.state.snapshot(world.now).engines}
    assert engines["p0"].channels == {"d0": "tcp"} and engines["p0"].ranks[0].closed == {}
    assert all(one.ok for one in health(list(engines.values())))
    world.say(worker("p0"), closed("d0"))
    assert world.state.snapshot(world.now).engines[0].ranks[0].closed == {"d0": "tcp: the peer closed it"}


def test_engines_whose_roles_make_them_partners_are_told_of_each_other() -> None:
    """Without it no channel would be opened between them until somebody joins or leaves."""
    world = World()
    world.join("b0", "both")
    world.join("b1", "both")

    def flip(engine_id: str, role: Role) -> None:
        world.act(world.state.handle(SetRole(engine_id, role), world.now))

    flip("b0", "decode")
    flip("b1", "decode")
    world.join("p0", "prefill")
    world.tick(0.1)
    assert [node.engine_id for node in world.to(worker("b1"), Peers)[-1].nodes] == ["p0"]  # type: ignore[union-attr]
    flip("b1", "prefill")
    world.tick(0.1)
    assert "b0" in [node.engine_id for node in world.to(worker("b1"), Peers)[-1].nodes]  # type: ignore[union-attr]


def test_engines_that_differ_are_not_paired_after_a_flip_either() -> None:
    """They were no partners when the second one joined, so nobody had compared them."""
    world = World()
    world.join("b0", "both")
    world.act(world.state.handle(SetRole("b0", "decode"), world.now))
    world.join("d1", "decode", fingerprint=FINGERPRINT | {"weights": "others"})
    world.act(world.state.handle(SetRole("b0", "prefill"), world.now))
    world.tick(0.1)
    world.connect("b0", "d1")
    world.ask()
    assert isinstance(world.answer("r1"), Local)
    assert [line for line in world.lines if "cannot exchange KV: fingerprint field weights" in line]
    assert "d1" not in [n.engine_id for m in world.to(worker("b0"), Peers) for n in m.nodes]  # type: ignore[union-attr]


@pytest.mark.parametrize("step_s", [-30.0, 30.0])
def test_a_clock_that_steps_is_followed(step_s: float) -> None:
    """The member's, or ours the other way: its stamps are right again within a minute, not after days."""
    world = one_pair()
    world.ask()

    def beats(count: int, offset_s: float) -> None:
        for _ in range(count):
            world.tick(0.5)
            world.beat("p0")
            world.say(sched("d0"), Heartbeat(incarnation=1, wall=world.now + offset_s, free_blocks=1000))

    beats(20, offset_s=100.0)
    beats(110, offset_s=100.0 + step_s)
    world.say(sched("d0"), Stamp(transfer_id="t-1", stage="landed", wall=world.now + 100.0 + step_s))
    (stamp,) = world.to(PROXY, Stamp)
    assert isinstance(stamp, Stamp) and stamp.wall == pytest.approx(world.now + 1000.0, abs=0.05)


def test_heartbeats_that_come_in_time_are_never_missed() -> None:
    """With the smallest number that may be set; a smaller one would lose every engine twice a second."""
    world = one_pair(missed_heartbeats=2)
    for _ in range(10):
        world.tick(0.5)
        world.beat("p0", "d0")
    assert "suspect" not in world.kinds
    with pytest.raises(ConfigError, match="missed_heartbeats is 1: use 2 or more"):
        RouterSettings(missed_heartbeats=1)
