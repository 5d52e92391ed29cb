"""The router's decisions, one promise a test. Pure: FakeClock values go in, actions come out."""

from collections.abc import Iterable

import msgspec
import pytest
from router_kit import FINGERPRINT, make_hello, make_pair, make_worker_hello

from pdxfer.router.events import Action, Happened, Log, Observed, Received, Send, SetDrain, Stop, Tick, Unreachable
from pdxfer.router.members import Identity, parse_route
from pdxfer.router.settings import RouterSettings
from pdxfer.router.state import RouterState
from pdxfer.wire.messages import (
    Busy,
    CancelGrant,
    Drain,
    Ended,
    FromMember,
    FromRouter,
    Goodbye,
    Grant,
    Heartbeat,
    HeartbeatAck,
    LegFailed,
    Local,
    Pairing,
    PeerReady,
    Peers,
    ProxyHello,
    Refused,
    Release,
    Role,
    Served,
    Stamp,
    Started,
    StoreAddress,
)

PROXY = b"proxy/x#1"


class World:
    """A router state with a clock and a memory of what it sent to whom."""

    def __init__(self, **settings: object) -> None:
        self.now = 100.0
        self.sent: list[tuple[bytes, FromRouter]] = []
        self.lines: list[str] = []
        self.kinds: list[str] = []
        self._num_ids = 0
        self.state = RouterState(RouterSettings(**settings), secret=b"s" * 32, mint=self._mint)  # type: ignore[arg-type]

    def _mint(self) -> str:
        self._num_ids += 1
        return f"t-{self._num_ids}"

    def act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent += [(route, action.message) for route in action.routes]
            elif isinstance(action, Log):
                self.lines.append(action.text)
            elif isinstance(action, Happened):
                self.kinds.append(action.kind)

    def say(self, route: bytes, *messages: FromMember) -> None:
        for message in messages:
            self.act(self.state.handle(Received(route, message, self.now + 1000.0), self.now))

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes, with a tick each 0.1 s as the server has it."""
        end = self.now + seconds
        while self.now + 0.1 < end:
            self.now += 0.1
            self.act(self.state.handle(Tick(), self.now))
        self.now = end
        self.act(self.state.handle(Tick(), self.now))

    def beat(self, *engine_ids: str, free_blocks: int = 1000, incarnation: int = 1) -> None:
        for engine_id in engine_ids:
            wall = self.now + 1000.0
            self.say(sched(engine_id), Heartbeat(incarnation=incarnation, wall=wall, free_blocks=free_blocks))
            self.say(worker(engine_id), Heartbeat(incarnation=incarnation, wall=wall))

    def join(self, engine_id: str, role: Role, **changes: object) -> None:
        incarnation = int(str(changes.get("incarnation", 1)))
        self.say(sched(engine_id), make_hello(engine_id, role, **changes))
        self.say(worker(engine_id), make_worker_hello(engine_id, incarnation=incarnation))

    def connect(self, prefill: str, decode: str, incarnation: int = 1) -> None:
        self.say(worker(prefill), PeerReady(engine_id=decode, incarnation=incarnation, kind="tcp"))

    def ask(self, request_id: str = "r1", num_tokens: int = 1000, proxy: bytes = PROXY, **changes: object) -> None:
        self.say(proxy, make_pair(request_id, num_tokens, **changes))

    def to(self, route: bytes, kind: type | tuple[type, ...] = object) -> list[FromRouter]:
        return [message for to, message in self.sent if to == route and isinstance(message, kind)]

    def answers(self, request_id: str) -> list[Pairing | Local | Busy]:
        return [
            message
            for _, message in self.sent
            if isinstance(message, Pairing | Local | Busy) and message.request_id == request_id
        ]

    def answer(self, request_id: str) -> Pairing | Local | Busy:
        (only,) = self.answers(request_id)
        return only

    def refused(self, reason: str) -> int:
        return self.state.out.counts[("refused", reason)]


def sched(engine_id: str) -> bytes:
    return f"{engine_id}/sched#1".encode()


def worker(engine_id: str, rank: int = 0) -> bytes:
    return f"{engine_id}/w{rank}#1".encode()


def one_pair(**settings: object) -> World:
    world = World(**settings)
    world.join("p0", "prefill")
    world.join("d0", "decode")
    world.connect("p0", "d0")
    return world


def grant(transfer_id: str, decode_id: str = "d0", epoch: int = 1, incarnation: int = 1) -> Grant:
    return Grant(
        transfer_id=transfer_id, epoch=epoch, decode_id=decode_id, decode_incarnation=incarnation, first_block=0,
        block_ids=[1, 2], num_tokens=1000, token_digest=b"",
    )  # fmt: skip


def ended(transfer_id: str, outcome: str = "delivered") -> Ended:
    return Ended(
        transfer_id=transfer_id,
        outcome=outcome,
        num_tokens=10,
        num_bytes=20,
        num_units=1,
        channel="tcp",  # type: ignore[arg-type]
    )


# ---- membership ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "identity"),
    [
        (b"d0/sched#ab", Identity("d0", "sched")), (b"d0/w12#ab", Identity("d0", "w12")),
        (b"proxy/one#ab", Identity("proxy", "one")), (b"d0/sched", None), (b"d0#1", None), (b"/sched#1", None),
        (b"\x00\x01\x02", None), (b"a/b/c#1", None), (b"d 0/sched#1", None), ("é/sched#1".encode(), None),
    ],
)  # fmt: skip
def test_identity_of_a_route(route: bytes, identity: Identity | None) -> None:
    """Only identity # random is a member's route."""
    assert parse_route(route) == identity


def test_an_engine_joins_when_its_scheduler_and_all_ranks_have() -> None:
    """Not before; and each hello is acknowledged."""
    world = World()
    world.say(sched("d0"), make_hello("d0", "decode", world_size=2))
    world.say(worker("d0"), make_worker_hello("d0"))
    assert "joined" not in world.kinds
    assert "engine d0 has not joined: waiting for worker ranks [1]" in world.state.cluster.reasons(world.now)
    world.say(worker("d0", 1), make_worker_hello("d0", rank=1))
    assert world.kinds == ["joined"]
    assert world.to(worker("d0", 1), HeartbeatAck) == [HeartbeatAck(known=True, wall=1100.0)]


def test_a_hello_that_names_another_engine_is_refused() -> None:
    """The identity of the connection and of the message must agree."""
    world = World()
    world.say(sched("d0"), make_hello("d1", "decode"))
    world.say(worker("d0"), make_worker_hello("d0", rank=3))
    world.say(worker("d0"), make_hello("d0", "decode"))
    world.say(PROXY, ProxyHello(proxy_id="other"))
    assert world.refused("hello") == 4 and not world.state.cluster.engines
    (refusal,) = world.to(sched("d0"), Refused)
    assert "this connection is d0/sched, its hello names d1" in refusal.reason


def test_an_older_incarnation_cannot_take_a_live_identity() -> None:
    """It is refused with both numbers; the live one goes on. A silent one may be replaced by any."""
    world = World()
    world.join("d0", "decode", incarnation=5)
    world.say(b"d0/sched#2", make_hello("d0", "decode", incarnation=4))
    (refusal,) = world.to(b"d0/sched#2", Refused)
    assert "incarnation 5, yours 4" in refusal.reason
    assert world.state.cluster.engines["d0"].incarnation == 5
    world.tick(2.0)
    world.say(b"d0/sched#2", make_hello("d0", "decode", incarnation=4))
    assert world.state.cluster.engines["d0"].incarnation == 4


def test_a_new_incarnation_replaces_the_old_and_its_transfers_end() -> None:
    """The other leg hears LegFailed; messages of the old life are not known any more."""
    world = one_pair()
    world.ask()
    world.say(b"d0/sched#2", make_hello("d0", "decode", incarnation=2))
    (failed,) = world.to(sched("p0"), LegFailed)
    assert failed.leg == "decode" and "replaced by incarnation 2" in failed.reason
    assert [m.outcome for m in world.to(PROXY, Ended)] == ["failed"]
    assert len(world.state.leases) == 0
    world.sent.clear()
    world.beat("d0")
    assert [m.known for m in world.to(sched("d0"), HeartbeatAck)] == [False]


def test_an_unknown_member_is_asked_for_its_hello() -> None:
    """After a restart of the router every heartbeat is answered known=False."""
    world = World()
    world.beat("d0")
    world.say(PROXY, Heartbeat(incarnation=1, wall=0.0))
    assert [m.known for _, m in world.sent if isinstance(m, HeartbeatAck)] == [False, False, False]


def test_three_missed_heartbeats_make_suspect_and_the_next_brings_back() -> None:
    """No pairing meanwhile; forgotten after a minute."""
    world = one_pair()
    world.tick(1.3)
    world.beat("p0")
    world.tick(0.2)
    assert world.kinds[-1] == "suspect", "a tick early rather than a tick late: within 1.5 s"
    world.ask(deadline_s=0.0)
    assert isinstance(world.answer("r1"), Busy)
    world.beat("d0")
    assert world.kinds[-1] == "back"
    world.ask("r2")
    assert isinstance(world.answer("r2"), Pairing)
    world.tick(61.0)
    assert not world.state.cluster.engines and "left" in world.kinds


def test_a_router_that_was_held_up_does_not_take_its_own_absence_for_silence() -> None:
    """No false death after a pause of any length, read or unread; who stays silent afterwards is noticed in time."""
    world = one_pair()
    world.tick(0.4)
    world.now += 30.0
    world.act(world.state.handle(Tick(), world.now))
    assert "suspect" not in world.kinds and "proxy_left" not in world.kinds
    world.beat("d0")
    began = world.now
    while "suspect" not in world.kinds:
        world.tick(0.1)
    assert 0.7 <= world.now - began <= 1.5, "0.4 s before the pause, 0.25 s of it, the rest after it, a tick early"
    assert world.state.cluster.engines["p0"].is_suspect and not world.state.cluster.engines["d0"].is_suspect
    world.beat("p0", "d0")
    world.now += 3.0
    world.tick()
    assert world.kinds[-1] == "back"


def test_slow_ticks_do_not_hide_a_death() -> None:
    """On a host so loaded that each tick is late, silence still adds up."""
    world = one_pair()
    began = world.now
    while "suspect" not in world.kinds:
        world.now += 0.4
        world.beat("d0")
        world.act(world.state.handle(Tick(), world.now))
    assert world.now - began <= 1.5 / 0.25 * 0.4 + 0.81


def test_a_closed_connection_makes_suspect_at_once() -> None:
    """The loop could not send to it."""
    world = one_pair()
    world.act(world.state.handle(Unreachable(sched("p0")), world.now))
    assert world.kinds[-1] == "suspect"
    world.beat("p0")
    assert world.kinds[-1] == "back"


def test_peers_are_nodes_of_the_same_rank_and_other_role_with_one_secret() -> None:
    """Workers hear of each other on the next tick, and again only when something changed."""
    world = World()
    world.join("p0", "prefill")
    world.join("d0", "decode")
    world.join("d1", "decode")
    world.tick()
    (peers,) = world.to(worker("p0"), Peers)
    assert [node.engine_id for node in peers.nodes] == ["d0", "d1"] and peers.secret == b"s" * 32
    assert [node.engine_id for node in world.to(worker("d0"), Peers)[0].nodes] == ["p0"]
    world.tick(0.1)
    assert len(world.to(worker("p0"), Peers)) == 1
    world.say(sched("d1"), Goodbye(reason="done"))
    world.tick(0.1)
    assert [node.engine_id for node in world.to(worker("p0"), Peers)[1].nodes] == ["d0"]
    assert len(world.to(worker("d0"), Peers)) == 1


def test_stores_are_told_to_all_nodes_of_the_same_kind_and_rank_whatever_their_roles() -> None:
    """Not to engines whose KV is another's, and not of nodes that serve nothing."""
    world = World()
    for name, changes in (("p0", {}), ("p1", {}), ("p2", {"fingerprint": {"model": "other"}}), ("p3", {})):
        world.join(name, "prefill", **changes)
        if name != "p3":
            address = StoreAddress(host="h", port=5600)
            world.say(worker(name), msgspec.structs.replace(make_worker_hello(name), store=address))
    world.tick()
    told = {
        name: [node.engine_id for node in world.to(worker(name), Peers)[-1].stores] for name in ("p0", "p1", "p2", "p3")
    }
    assert told == {"p0": ["p0", "p1"], "p1": ["p0", "p1"], "p2": ["p2"], "p3": ["p0", "p1"]}


def test_engines_for_both_roles_pair_with_each_other_but_not_with_themselves() -> None:
    """kv_both: each can be either leg."""
    world = World()
    world.join("b0", "both")
    assert world.state.cluster.has_pair()
    world.ask("alone")
    assert isinstance(world.answer("alone"), Local)
    world.join("b1", "both")
    world.connect("b1", "b0")
    world.connect("b0", "b1")
    world.ask("two")
    answer = world.answer("two")
    assert isinstance(answer, Pairing) and answer.prefill.engine_id != answer.decode.engine_id


def test_a_differing_fingerprint_fails_closed_with_one_line() -> None:
    """First differing field and both values, once in the log and in the reasons; no peers, no pairing."""
    world = World()
    world.join("p0", "prefill")
    world.join("d0", "decode", fingerprint={**FINGERPRINT, "dtype": "bfloat16", "model": "other"})
    world.say(worker("p0"), PeerReady(engine_id="d0", incarnation=1, kind="tcp"))
    world.join("p0", "prefill")
    world.tick()
    line = "fingerprint field dtype is 'float32' at p0 and 'bfloat16' at d0"
    assert len([text for text in world.lines if line in text]) == 1
    assert any(line in reason for reason in world.state.cluster.reasons(world.now))
    assert world.to(worker("p0"), Peers)[0].nodes == []
    world.ask()
    assert isinstance(world.answer("r1"), Local)


def test_a_pair_needs_every_rank_of_prefill_to_reach_this_life_of_decode() -> None:
    """One closed channel, or one to an earlier incarnation, and there is no pair."""
    world = World()
    world.say(sched("p0"), make_hello("p0", "prefill", world_size=2))
    for rank in (0, 1):
        world.say(worker("p0", rank), make_worker_hello("p0", rank))
    world.say(sched("d0"), make_hello("d0", "decode", world_size=2, incarnation=2))
    for rank in (0, 1):
        world.say(worker("d0", rank), make_worker_hello("d0", rank, incarnation=2))
    world.say(worker("p0", 0), PeerReady(engine_id="d0", incarnation=2, kind="tcp"))
    assert not world.state.cluster.has_pair()
    world.say(worker("p0", 1), PeerReady(engine_id="d0", incarnation=2, kind="", reason="probe failed"))
    assert "channel of rank 1 could not be opened: probe failed" in world.state.cluster.reasons(world.now)[0]
    world.say(worker("p0", 1), PeerReady(engine_id="d0", incarnation=1, kind="tcp"))
    assert not world.state.cluster.has_pair()
    world.say(worker("p0", 1), PeerReady(engine_id="d0", incarnation=2, kind="tcp"))
    assert world.state.cluster.has_pair()


# ---- pairing ---------------------------------------------------------------------------------------------------------


def test_least_loaded_engines_are_paired() -> None:
    """Prefill by outstanding tokens, decode by credit; ties by name."""
    world = World()
    for engine_id in ("p0", "p1"):
        world.join(engine_id, "prefill")
    world.join("d0", "decode", free_blocks=500)
    world.join("d1", "decode", free_blocks=600)
    for prefill in ("p0", "p1"):
        for decode in ("d0", "d1"):
            world.connect(prefill, decode)
    for number in range(4):
        world.ask(f"r{number}", num_tokens=1600 - 1)
    pairs = [(a.prefill.engine_id, a.decode.engine_id) for a in (world.answer(f"r{n}") for n in range(4))]  # type: ignore[union-attr]
    assert pairs == [("p0", "d1"), ("p1", "d0"), ("p0", "d1"), ("p1", "d0")]


def test_prefilled_stamp_takes_the_load_off_prefill() -> None:
    """Outstanding tokens count until the prompt is computed, once."""
    world = one_pair()
    world.ask(num_tokens=1000)
    assert world.state.cluster.engines["p0"].outstanding_tokens == 1000
    for _ in range(2):
        world.say(sched("p0"), Stamp(transfer_id="t-1", stage="prefilled", wall=0.0))
    assert world.state.cluster.engines["p0"].outstanding_tokens == 0
    world.say(sched("d0"), ended("t-1"))
    assert world.state.cluster.engines["p0"].outstanding_tokens == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 255}, "short prompt"),
        ({"local_only": True}, "asked for a decode engine alone"),
    ],
)
def test_some_requests_go_to_decode_alone(changes: dict[str, object], reason: str) -> None:
    """Short prompts and those that ask for it."""
    world = one_pair()
    world.ask(**changes)  # type: ignore[arg-type]
    answer = world.answer("r1")
    assert isinstance(answer, Local) and answer.reason == reason and answer.decode.engine_id == "d0"


def test_a_short_prompt_that_had_no_prefill_either_says_so() -> None:
    """Whoever reads "short prompt" may conclude that a longer one would be paired."""
    world = World()
    world.join("d0", "decode")
    world.ask(num_tokens=255)
    answer = world.answer("r1")
    assert isinstance(answer, Local) and answer.reason == "no prefill engine is ready"


def test_a_prompt_of_one_block_is_local() -> None:
    """Whatever min_remote_tokens says."""
    world = one_pair(min_remote_tokens=0)
    world.ask("fits", num_tokens=16)
    world.ask("more", num_tokens=17)
    assert isinstance(world.answer("fits"), Local) and isinstance(world.answer("more"), Pairing)


def test_without_prefill_a_request_is_local() -> None:
    """A decode engine alone is slower, not broken."""
    world = World()
    world.join("d0", "decode")
    world.ask()
    answer = world.answer("r1")
    assert isinstance(answer, Local) and answer.reason == "no prefill engine is ready"


def test_only_engines_that_serve_the_model_are_taken() -> None:
    """An unknown name is Busy after a short wait: the engine may be starting."""
    world = one_pair()
    world.join("d1", "decode", served_names=["lora"], free_blocks=5000)
    world.ask("r1", model="demo")
    assert world.answer("r1").decode.engine_id == "d0"  # type: ignore[union-attr]
    world.ask("r2", model="lora")
    assert isinstance(world.answer("r2"), Local)
    world.ask("r3", model="nothing")
    assert world.answers("r3") == []
    world.tick(2.1)
    answer = world.answer("r3")
    assert isinstance(answer, Busy) and answer.reason == "no decode engine serves 'nothing'"


def test_an_account_that_a_release_overtook_still_reaches_its_proxy_once() -> None:
    """The proxy is done before decode's Ended: what was moved is not lost."""
    world = one_pair()
    world.ask()
    world.say(PROXY, Release(transfer_id="t-1", reason="done"))
    for _ in range(2):
        world.say(sched("d0"), ended("t-1"))
    assert [m.transfer_id for _, m in world.sent if isinstance(m, Ended)] == ["t-1"]


def test_what_never_fits_goes_to_an_engine_at_once() -> None:
    """No use waiting: the engine refuses it in its own words, with its own status."""
    world = one_pair()
    world.ask(num_tokens=16_000)
    answer = world.answer("r1")
    assert isinstance(answer, Local) and answer.reason == "larger than any decode engine"


def test_credit_is_what_is_free_minus_what_was_promised_since() -> None:
    """A report includes a pairing only after its Grant, and some lag; unused pairings give back at once."""
    world = one_pair()
    credit = world.state.cluster.engines["d0"].credit
    world.ask("r1", num_tokens=16 * 400 - 1)
    assert credit.available == 600
    world.beat("d0", free_blocks=1000)
    assert credit.available == 600
    world.say(sched("d0"), grant("t-1"))
    world.beat("d0", free_blocks=600)
    assert credit.available == 200
    world.now += 0.2
    world.beat("d0", free_blocks=600)
    assert credit.available == 600
    world.ask("r2", num_tokens=16 * 100 - 1)
    world.say(PROXY, Release(transfer_id="t-2", reason="client gone"))
    assert credit.available == 600
    credit.check()


def test_a_request_waits_for_capacity_and_is_served_when_it_returns() -> None:
    """Answered by the heartbeat that brings the blocks."""
    world = one_pair()
    world.beat("d0", free_blocks=10)
    world.ask()
    assert world.answers("r1") == []
    world.beat("d0", free_blocks=900)
    assert isinstance(world.answer("r1"), Pairing)


def test_the_deadline_ends_the_wait_with_a_hint() -> None:
    """Busy, with a retry_after that grows with the queue's age."""
    world = one_pair()
    world.beat("d0", free_blocks=0)
    world.ask(deadline_s=3.0)
    for _ in range(7):
        world.tick(0.5)
        world.beat("d0", "p0", free_blocks=0)
    answer = world.answer("r1")
    assert isinstance(answer, Busy) and answer.retry_after_s >= 1.0
    assert answer.reason == "no decode engine has enough free KV blocks"


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_a_deadline_that_leaves_no_time_is_answered_at_once(deadline_s: float) -> None:
    """Served if it fits now, Busy otherwise."""
    world = one_pair()
    world.ask("now", deadline_s=deadline_s)
    assert isinstance(world.answer("now"), Pairing)
    world.beat("d0", free_blocks=0)
    world.ask("full", deadline_s=deadline_s)
    assert isinstance(world.answer("full"), Busy)


def test_tenants_take_turns() -> None:
    """One tenant's hundred do not delay the other's one."""
    world = one_pair()
    world.beat("d0", free_blocks=0)
    for number in range(10):
        world.ask(f"a{number}", num_tokens=1599, tenant="a")
    world.ask("b0", num_tokens=1599, tenant="b")
    world.beat("d0", free_blocks=200)
    served = [m.request_id for m in world.to(PROXY, Pairing)]
    assert served == ["a0", "b0"]


def test_a_full_queue_crowds_out_the_tenant_with_most() -> None:
    """The newest of the greedy tenant is answered Busy; a tenant alone gets Busy itself."""
    world = one_pair(max_queue=3)
    world.beat("d0", free_blocks=0)
    for number in range(4):
        world.ask(f"a{number}", tenant="a")
    assert isinstance(world.answer("a3"), Busy)
    world.ask("b0", tenant="b")
    assert isinstance(world.answer("a2"), Busy) and world.answers("b0") == []
    assert "3 requests are waiting already" in world.answer("a2").reason  # type: ignore[union-attr]


def test_small_requests_pass_a_big_one_but_do_not_starve_it() -> None:
    """After max_bypasses an engine is kept free for the big one."""
    world = one_pair(max_bypasses=3)
    world.beat("d0", free_blocks=150)
    world.ask("big", num_tokens=16 * 200 - 1)
    for number in range(3):
        world.ask(f"small{number}", num_tokens=16 * 40 - 1)
        assert isinstance(world.answer(f"small{number}"), Pairing)
    world.ask("small3", num_tokens=16 * 20 - 1)
    assert world.answers("small3") == []
    world.beat("d0", free_blocks=120 + 199)
    assert world.answers("big") == []
    world.beat("d0", free_blocks=120 + 200)
    assert isinstance(world.answer("big"), Pairing) and world.answers("small3") == []
    world.beat("d0", free_blocks=120 + 200 + 20)
    assert isinstance(world.answer("small3"), Pairing)


def test_a_repeated_question_in_the_queue_is_answered_once() -> None:
    """Duplicates are counted."""
    world = one_pair()
    world.beat("d0", free_blocks=0)
    world.ask()
    world.ask()
    world.beat("d0", free_blocks=1000)
    assert isinstance(world.answer("r1"), Pairing) and world.refused("duplicate") == 1


def test_draining_engines_get_no_new_work_and_say_when_they_are_empty() -> None:
    """Running transfers finish; the engine is told."""
    world = one_pair()
    world.ask("r1")
    world.act(world.state.handle(SetDrain("p0", True), world.now))
    assert world.to(sched("p0"), Drain) == [Drain(on=True)]
    world.ask("r2")
    assert isinstance(world.answer("r2"), Local) and "drained" not in world.kinds
    world.say(sched("d0"), ended("t-1"))
    assert world.kinds[-1] == "drained"
    world.act(world.state.handle(SetDrain("p0", False), world.now))
    world.ask("r3")
    assert isinstance(world.answer("r3"), Pairing)


def test_a_stopping_router_answers_busy_and_lets_transfers_end() -> None:
    """Those who wait are answered too."""
    world = one_pair()
    world.ask("running")
    world.beat("d0", free_blocks=0)
    world.ask("waiting")
    world.act(world.state.handle(Stop(), world.now))
    world.ask("new")
    assert all("shutting down" in world.answer(r).reason for r in ("waiting", "new"))  # type: ignore[union-attr]
    world.say(sched("d0"), ended("t-1"))
    assert len(world.state.leases) == 0


def test_a_stopping_router_still_sends_requests_to_decode_alone() -> None:
    """A restart of the router costs no request: they are only not paired."""
    world = one_pair()
    world.act(world.state.handle(Stop(), world.now))
    world.ask("new")
    answer = world.answer("new")
    assert isinstance(answer, Local) and answer.decode.engine_id == "d0" and "shutting down" in answer.reason


# ---- transfers -------------------------------------------------------------------------------------------------------


def test_messages_of_a_transfer_reach_the_other_leg() -> None:
    """Started to decode with the prefill's name; Grant to prefill's workers and scheduler; Ended to the proxy."""
    world = one_pair()
    world.ask()
    world.say(sched("p0"), Started(transfer_id="t-1", num_tokens=1000))
    assert world.to(sched("d0"), Started) == [Started(transfer_id="t-1", num_tokens=1000, prefill_id="p0")]
    world.say(sched("d0"), grant("t-1"))
    assert world.to(worker("p0"), Grant) == world.to(sched("p0"), Grant) == [grant("t-1")]
    world.say(sched("d0"), CancelGrant(transfer_id="t-1", reason="hit"))
    assert len(world.to(worker("p0"), CancelGrant)) == len(world.to(sched("p0"), CancelGrant)) == 1
    world.say(sched("d0"), ended("t-1"))
    assert world.to(PROXY, Ended) == [ended("t-1")]
    assert world.state.out.num_bytes == 20


def test_only_the_legs_of_a_transfer_may_speak_for_it() -> None:
    """Others are dropped and counted, and a Grant must carry its sender's own id and life."""
    world = one_pair()
    world.join("d1", "decode")
    world.ask()
    world.sent.clear()
    world.say(sched("d1"), grant("t-1", "d1"), ended("t-1"), CancelGrant(transfer_id="t-1", reason=""))
    world.say(sched("d1"), LegFailed(transfer_id="t-1", leg="decode", reason=""))
    world.say(sched("d0"), Started(transfer_id="t-1", num_tokens=1), grant("t-1", "d1"), grant("t-1", incarnation=9))
    world.say(sched("d0"), LegFailed(transfer_id="t-1", leg="prefill", reason=""))
    world.say(b"proxy/y#1", Release(transfer_id="t-1", reason=""))
    world.say(worker("d0"), ended("t-1"))
    assert world.refused("foreign") == 9 and world.refused("unexpected") == 1
    assert world.sent == [] and len(world.state.leases) == 1


def test_stamps_reach_the_proxy_in_its_own_clock_and_the_controller_in_the_routers() -> None:
    """Each of three hosts has its own: the timeline's stages are differences between them."""
    world = one_pair()
    world.say(PROXY, Heartbeat(incarnation=1, wall=world.now + 1000.0 - 7.0))
    world.ask()
    world.say(sched("d0"), Heartbeat(incarnation=1, wall=world.now + 1000.0 - 50.0, free_blocks=1000))
    world.say(PROXY, Heartbeat(incarnation=1, wall=world.now + 1000.0 - 7.0))
    world.say(sched("d0"), Stamp(transfer_id="t-1", stage="landed", wall=500.0))
    (stamp,) = world.to(PROXY, Stamp)
    assert isinstance(stamp, Stamp) and stamp.wall == pytest.approx(543.0)
    served = Served(
        request_id="r1", endpoint="chat", mode="pair", outcome="ok", arrival=542.0, end=544.0, first_byte=543.5,
        stamps={"landed": stamp.wall},
    )  # fmt: skip
    [told] = world.state.handle(Received(PROXY, served, world.now), world.now)
    assert isinstance(told, Observed) and isinstance(told.report, Served)
    report = told.report
    assert (report.arrival, report.stamps["landed"], report.first_byte, report.end) == (549.0, 550.0, 550.5, 551.0)


def test_stamps_are_shifted_by_the_least_delayed_heartbeat_and_may_come_late() -> None:
    """Offset from heartbeats; 'scheduled' often follows Ended."""
    world = one_pair()
    world.ask()
    for delay in (0.3, 0.001, 0.2):
        world.say(sched("d0"), Heartbeat(incarnation=1, wall=world.now + 1000.0 - 50.0 - delay, free_blocks=1000))
    world.say(sched("d0"), ended("t-1"))
    world.say(sched("d0"), Stamp(transfer_id="t-1", stage="scheduled", wall=500.0))
    (stamp,) = world.to(PROXY, Stamp)
    assert stamp.stage == "scheduled" and stamp.wall == pytest.approx(550.001, abs=0.001)


def test_a_lost_prefill_lets_decode_finish_alone() -> None:
    """Decode and proxy hear LegFailed once; the lease ends with decode's Ended; a later Grant goes nowhere."""
    world = one_pair()
    world.ask()
    for _ in range(70):
        world.now += 1.0
        world.beat("d0")
        world.say(PROXY, Heartbeat(incarnation=1, wall=0.0))
        world.tick()
    assert list(world.state.cluster.engines) == ["d0"]
    (failed,) = world.to(sched("d0"), LegFailed)
    assert failed.leg == "prefill" and world.to(PROXY, LegFailed) == [failed]
    world.say(sched("d0"), grant("t-1"))
    assert world.refused("stale") == 1 and world.to(worker("p0"), Grant) == []
    world.say(sched("d0"), ended("t-1", "failed"))
    assert [m.outcome for m in world.to(PROXY, Ended)] == ["failed"]


def test_a_lost_decode_ends_the_transfer() -> None:
    """Prefill hears LegFailed, the proxy LegFailed and Ended; decode, if it is only slow, is told to wait no more."""
    world = one_pair()
    world.ask()
    world.now += 1.6
    world.beat("p0")
    world.tick()
    assert [m.leg for m in world.to(sched("p0"), LegFailed)] == ["decode"]
    assert [m.leg for m in world.to(sched("d0"), LegFailed)] == ["prefill"]
    assert [type(m) for m in world.to(PROXY, (LegFailed, Ended))] == [LegFailed, Ended]
    world.say(sched("d0"), ended("t-1"))
    assert len(world.to(PROXY, Ended)) == 1 and world.refused("late") == 1


def test_the_proxy_can_fail_either_leg() -> None:
    """Prefill: decode is told. Decode: prefill is told and it is over."""
    world = one_pair()
    world.ask("r1")
    world.say(PROXY, LegFailed(transfer_id="t-1", leg="prefill", reason="HTTP 500"))
    assert [m.reason for m in world.to(sched("d0"), LegFailed)] == ["HTTP 500"]
    assert len(world.state.leases) == 1 and world.to(PROXY, LegFailed) == []
    world.ask("r2")
    world.say(PROXY, LegFailed(transfer_id="t-2", leg="decode", reason="HTTP 500"))
    assert [m.leg for m in world.to(sched("p0"), LegFailed)] == ["decode"]
    assert len(world.state.leases) == 1


def test_release_ends_the_pairing_on_both_sides() -> None:
    """Nobody waits for the other; the proxy, who knows, hears nothing."""
    world = one_pair()
    world.ask()
    world.say(PROXY, Release(transfer_id="t-1", reason="client gone"))
    assert world.to(sched("p0"), CancelGrant) and world.to(worker("p0"), CancelGrant)
    assert [m.leg for m in world.to(sched("d0"), LegFailed)] == ["prefill"]
    assert world.to(PROXY, (Ended, LegFailed)) == [] and len(world.state.leases) == 0


def test_a_lease_expires_unless_it_makes_progress() -> None:
    """Started and a new Grant renew it; then both legs and the proxy hear of the end, once."""
    world = one_pair(lease_s=10.0)

    def wait(seconds: int) -> None:
        for _ in range(seconds):
            world.now += 1.0
            world.beat("p0", "d0")
            world.say(PROXY, Heartbeat(incarnation=1, wall=0.0))
            world.tick()

    world.ask()
    wait(8)
    world.say(sched("p0"), Started(transfer_id="t-1", num_tokens=1000))
    wait(8)
    world.say(sched("d0"), grant("t-1"), grant("t-1"))
    wait(8)
    assert len(world.state.leases) == 1
    wait(3)
    assert len(world.state.leases) == 0
    assert [m.reason for m in world.to(PROXY, Ended)] == ["the lease expired"]
    assert world.to(sched("p0"), CancelGrant) and world.to(sched("d0"), LegFailed)


def test_a_proxy_that_leaves_takes_its_leases_and_questions_with_it() -> None:
    """By Goodbye, or silence."""
    world = one_pair()
    world.ask("r1")
    world.beat("d0", free_blocks=0)
    world.ask("r2")
    world.say(PROXY, Goodbye(reason="stop"))
    assert len(world.state.leases) == 0 and len(world.state.placement.queue) == 0
    assert world.answers("r2") == [] and world.kinds[-1] == "proxy_left"
    world.ask("r3", proxy=b"proxy/y#1")
    for _ in range(4):
        world.tick(1.0)
        world.beat("d0", "p0")
    assert len(world.state.placement.queue) == 0 and not world.state.cluster.proxies
