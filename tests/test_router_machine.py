"""A Hypothesis rule machine over the router's state: any order of messages, losses, repeats, deaths and returns.

Invariants: credits never negative and consistent, no pairing onto engines that are suspect, draining, mismatched or
not connected, each question answered at most once and every one by its deadline, each pairing ended exactly once, and
in the end nothing is left.
"""

import itertools
import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from router_kit import FINGERPRINT, make_hello, make_pair, make_worker_hello
from test_router_state import World, ended, grant, sched, worker

from pdxfer.router.events import SetDrain, Unreachable
from pdxfer.router.members import difference
from pdxfer.wire.messages import (
    Busy,
    CancelGrant,
    Ended,
    Goodbye,
    Heartbeat,
    LegFailed,
    Local,
    Pairing,
    PeerReady,
    Release,
    Resume,
    Role,
    Stamp,
    Started,
)

ROLES: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "b0": "both"}
ENGINES = st.sampled_from(sorted(ROLES))
PROXIES = st.sampled_from([b"proxy/x#1", b"proxy/y#1"])
SELDOM = st.sampled_from([False, False, False, True])
TOKENS = st.integers(200, 2500)
LEASE_S = 8.0
WAIT_S = 5.0


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(lease_s=LEASE_S, max_wait_s=WAIT_S, max_queue=6, max_bypasses=2, forget_s=20.0)
        self.num_asked = 0
        self.answered: set[str] = set()
        self.paired: dict[str, bytes] = {}
        self.over: dict[str, int] = {}
        self.given_up: set[str] = set()
        """Ended by their proxy: decode's account may still reach it, once."""
        self.unanswered: dict[str, bytes] = {}
        """Of proxies that are still there."""
        self.seen = 0

    @initialize()
    def begin(self) -> None:
        self.all_is_well()

    @rule()
    def all_is_well(self) -> None:
        """Everybody (re)joins, opens channels and reports: else random trouble leaves nobody to pair."""
        engines = self.world.state.cluster.engines
        for engine_id, role in ROLES.items():
            incarnation = engines[engine_id].incarnation if engine_id in engines else 1
            self.world.join(engine_id, role, free_blocks=100, incarnation=incarnation)
            self.world.beat(engine_id, free_blocks=100, incarnation=incarnation)
            self.drain(engine_id, False)
        for prefill, decode in itertools.permutations(ROLES, 2):
            self.world.connect(prefill, decode, engines[decode].incarnation)

    # ---- members ---------------------------------------------------------------------------------------------

    @rule(engine_id=ENGINES, incarnation=st.integers(1, 3), dtype=st.sampled_from(["float32", "float32", "bfloat16"]))
    def joins(self, engine_id: str, incarnation: int, dtype: str) -> None:
        fingerprint = {**FINGERPRINT, "dtype": dtype}
        self.world.join(engine_id, ROLES[engine_id], incarnation=incarnation, fingerprint=fingerprint, free_blocks=100)

    @rule(engine_id=ENGINES, half=st.booleans(), incarnation=st.integers(1, 3))
    def half_joins(self, engine_id: str, half: bool, incarnation: int) -> None:
        if half:
            self.world.say(sched(engine_id), make_hello(engine_id, ROLES[engine_id], incarnation=incarnation))
        else:
            self.world.say(worker(engine_id), make_worker_hello(engine_id, incarnation=incarnation))

    @rule(one=ENGINES, other=ENGINES, incarnation=st.integers(1, 3), is_open=st.booleans())
    def channel(self, one: str, other: str, incarnation: int, is_open: bool) -> None:
        kind = "tcp" if is_open else ""
        self.world.say(worker(one), PeerReady(engine_id=other, incarnation=incarnation, kind=kind))

    @rule(free_blocks=st.integers(0, 150), skip=st.sets(ENGINES, max_size=2))
    def heartbeats(self, free_blocks: int, skip: set[str]) -> None:
        for engine_id in set(self.world.state.cluster.engines) - skip:
            incarnation = self.world.state.cluster.engines[engine_id].incarnation
            self.world.beat(engine_id, free_blocks=free_blocks, incarnation=incarnation)

    @rule(engine_id=ENGINES, on=st.booleans())
    def drain(self, engine_id: str, on: bool) -> None:
        self.world.act(self.world.state.handle(SetDrain(engine_id, on), self.world.now))

    @rule(engine_id=ENGINES)
    def connection_closes(self, engine_id: str) -> None:
        self.world.act(self.world.state.handle(Unreachable(sched(engine_id)), self.world.now))

    @rule(engine_id=ENGINES)
    def leaves(self, engine_id: str) -> None:
        self.world.say(sched(engine_id), Goodbye(reason="test"))

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.6, 2.0, 7.0]), silent=st.sets(ENGINES, max_size=2))
    def time_passes(self, seconds: float, silent: set[str]) -> None:
        self.world.now += seconds
        for proxy in set(self.world.state.cluster.proxies):
            self.world.say(proxy, Heartbeat(incarnation=1, wall=self.world.now))
        self.heartbeats(100, silent)
        self.answers_are_right()
        self.world.tick()

    # ---- requests --------------------------------------------------------------------------------------------

    @rule(proxy=PROXIES, num_tokens=TOKENS, tenant=st.sampled_from(["a", "b"]), local_only=SELDOM)
    def asks(self, proxy: bytes, num_tokens: int, tenant: str, local_only: bool) -> None:
        self.num_asked += 1
        self.unanswered[f"r{self.num_asked}"] = proxy
        pair = make_pair(f"r{self.num_asked}", num_tokens, tenant=tenant, local_only=local_only, deadline_s=WAIT_S)
        self.world.say(proxy, pair)

    @rule(data=st.data(), sender=ENGINES, kind=st.integers(0, 7), epoch=st.integers(0, 2))
    def an_engine_speaks(self, data: st.DataObject, sender: str, kind: int, epoch: int) -> None:
        transfer_id = self._some_transfer(data)
        lease = self.world.state.leases.get(transfer_id)
        if lease is not None and data.draw(st.booleans()):
            sender = data.draw(st.sampled_from([lease.prefill.engine_id, lease.decode.engine_id]))
        engine = self.world.state.cluster.engines.get(sender)
        message = [
            Started(transfer_id=transfer_id, num_tokens=1),
            grant(transfer_id, sender, epoch, engine.incarnation if engine else 1),
            CancelGrant(transfer_id=transfer_id, reason=""),
            LegFailed(transfer_id=transfer_id, leg="prefill", reason=""),
            LegFailed(transfer_id=transfer_id, leg="decode", reason=""),
            Stamp(transfer_id=transfer_id, stage="prefilled", wall=0.0),
            ended(transfer_id),
            Resume(transfer_id=transfer_id, epoch=epoch + 1, first_missing=0, num_missing_tokens=500, reason=""),
        ][kind]
        self.world.say(sched(sender), message)  # type: ignore[arg-type]

    @rule(data=st.data(), num_steps=st.integers(1, 4))
    def a_transfer_goes_on(self, data: st.DataObject, num_steps: int) -> None:
        lease = self.world.state.leases.get(self._some_transfer(data))
        if lease is None:
            return
        key, decode = lease.transfer_id, lease.decode
        self.world.say(sched(lease.prefill.engine_id), Started(transfer_id=key, num_tokens=1))
        to_decode = [grant(key, decode.engine_id, 1, decode.incarnation), ended(key), ended(key)]
        self.world.say(sched(decode.engine_id), *to_decode[: num_steps - 1])

    @rule(data=st.data(), proxy=PROXIES, kind=st.integers(0, 2))
    def a_proxy_speaks(self, data: st.DataObject, proxy: bytes, kind: int) -> None:
        transfer_id = self._some_transfer(data)
        if kind == 0:
            lease = self.world.state.leases.get(transfer_id)
            self.world.say(proxy, Release(transfer_id=transfer_id, reason=""))
            if lease is not None and lease.proxy == proxy:
                self.over[transfer_id] = self.over.get(transfer_id, 0) + 1
                self.given_up.add(transfer_id)
        else:
            leg = "prefill" if kind == 1 else "decode"
            self.world.say(proxy, LegFailed(transfer_id=transfer_id, leg=leg, reason=""))

    def _some_transfer(self, data: st.DataObject) -> str:
        """A live one as often as one that ended or never was."""
        live = [t for t in self.paired if self.world.state.leases.get(t) is not None]
        if live and data.draw(st.booleans()):
            return data.draw(st.sampled_from(live))
        return f"t-{data.draw(st.integers(1, 1 + len(self.paired)))}"

    @rule(proxy=PROXIES)
    def a_proxy_leaves(self, proxy: bytes) -> None:
        for lease in self.world.state.leases.of_proxy(proxy):
            self.given_up.add(lease.transfer_id)
            self.over[lease.transfer_id] = self.over.get(lease.transfer_id, 0) + 1
        self.world.say(proxy, Goodbye(reason="test"))
        self.unanswered = {key: asker for key, asker in self.unanswered.items() if asker != proxy}

    # ---- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def answers_are_right(self) -> None:
        for route, message in self.world.sent[self.seen :]:
            if isinstance(message, Pairing | Local | Busy):
                assert message.request_id not in self.answered, message
                self.answered.add(message.request_id)
                self.unanswered.pop(message.request_id, None)
            if isinstance(message, Pairing):
                self.paired[message.transfer_id] = route
                self._check_pairing(message)
            if isinstance(message, Ended) and message.transfer_id in self.given_up:
                self.given_up.remove(message.transfer_id)
            elif isinstance(message, Ended):
                self.over[message.transfer_id] = self.over.get(message.transfer_id, 0) + 1
        self.seen = len(self.world.sent)

    def _check_pairing(self, pairing: Pairing) -> None:
        """Checked right after the rule that made it; a rule never both pairs and then spoils an engine."""
        prefill = self.world.state.cluster.engines[pairing.prefill.engine_id]
        decode = self.world.state.cluster.engines[pairing.decode.engine_id]
        assert prefill.is_usable and decode.is_usable and prefill is not decode
        assert not difference(prefill, decode)
        ready = prefill.workers[0].ready[decode.engine_id]
        assert ready.kind and ready.incarnation == decode.incarnation

    @invariant()
    def each_pairing_ends_once(self) -> None:
        for transfer_id, count in self.over.items():
            assert count == 1, (transfer_id, count)
            assert self.world.state.leases.get(transfer_id) is None
        live = {t for t in self.paired if self.world.state.leases.get(t) is not None}
        assert live | set(self.over) == set(self.paired)

    @invariant()
    def sums_agree(self) -> None:
        state = self.world.state
        for engine in state.cluster.engines.values():
            engine.credit.check()
            assert engine.credit.available >= 0 and engine.outstanding_tokens >= 0
            leases = [x for x in state.leases.of_engine(engine.engine_id) if x.prefill is engine]
            assert engine.outstanding_tokens == sum(x.num_tokens for x in leases if not x.is_prefill_over)
        assert len(state.placement.queue) <= 6

    def teardown(self) -> None:
        """Everything ends by its deadline, whoever is silent."""
        for _ in range(int(LEASE_S + WAIT_S) + 2):
            self.time_passes(1.0, set())
        self.answers_are_right()
        self.each_pairing_ends_once()
        assert len(self.world.state.leases) == 0 and len(self.world.state.placement.queue) == 0
        assert not self.unanswered


EXAMPLES = 20 if os.environ.get("PDXFER_TIER") == "fast" else 100
RouterMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
test_router_machine = RouterMachine.TestCase
