"""The store in the scheduler half: what is asked, claimed, loaded and saved, and that everything comes back.

vLLM's classes are only needed for their names; requests and the pool are small fakes. Importing them takes seconds, so
these tests are not in the fast tier.
"""

import queue
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.wire.store_facts import Find, Found, Held, Load, Loaded, Prefetch, Saved, Unload

pytestmark = pytest.mark.slow

BLOCK, CHUNK = 16, 32
IDENTITY = bytes(range(16))


@dataclass
class Request:
    """What we read of vLLM's."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False
    kv_transfer_params: Any = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_STOPPED"))

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]


class Member:
    """Collects what would be sent."""

    incarnation, generations, is_connected = 1, [0], True

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.router: list[Any] = []

    def tell_worker(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def tell_workers(self, message: Any) -> None:
        self.sent.append((-1, message))

    def tell_router(self, message: Any) -> None:
        self.router.append(message)

    def stamp(self, *_: Any) -> None:
        pass

    def leg_failed(self, transfer_id: str, leg: Any, reason: str) -> None:
        from pdxfer.wire.messages import LegFailed

        self.tell_router(LegFailed(transfer_id=transfer_id, leg=leg, reason=reason))

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]


class Pool:
    """vLLM's block pool, as far as references go."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0, block_hash=f"h{i}") for i in range(num_blocks)]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


class Engine:
    """The halves' parts, put together as scheduler_half.py does."""

    def __init__(self, world_size: int = 1, **config: Any) -> None:
        from pdxfer.connector.member import EngineFacts
        from pdxfer.connector.receives import Receives
        from pdxfer.connector.references import References
        from pdxfer.connector.store_half import StoreHalf

        self.clock, self.member, self.pool = FakeClock(), Member(), Pool()
        facts = EngineFacts(
            model="m", served_names=["m"], num_blocks=64, block_size=BLOCK, max_model_len=4096, world_size=world_size,
            max_step_blocks=4, plans_ready_hits=True,
        )  # fmt: skip
        references = References()
        references.bind(self.pool)  # type: ignore[arg-type]
        settings = StoreConfig(enabled=True, **config)
        self.store = StoreHalf(settings, CHUNK, facts, self.member, references, self.clock)  # type: ignore[arg-type]
        self.store.grid.identities.update({rank: bytes([rank]) + IDENTITY[1:] for rank in range(world_size)})
        self.receives = Receives("e", facts, self.member, references, self.store.loads, self.clock)  # type: ignore[arg-type]

    def hold(self, chunks: list[Any], tier: str = "dram") -> None:
        for rank in range(self.store.grid.world_size):
            self.store.mirror.apply(Held(rank=rank, tier=tier, added=[chunk[rank].key for chunk in chunks]))

    def keys(self, request: Request) -> list[Any]:
        from pdxfer.connector.chunks import PromptChunks

        chunks = PromptChunks(request, self.store.grid)  # type: ignore[arg-type]
        tail = chunks.tail(request.num_tokens)
        return chunks.full(request.num_tokens) + ([tail] if tail else [])

    def ask(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        return self.receives.matched_tokens(request, computed)  # type: ignore[arg-type]

    def allocate(self, request: Request, table: list[int], external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        self.receives.allocated(request, blocks, external)  # type: ignore[arg-type]

    def step(self, request: Request, begin: int, count: int, table: list[int], preempted: tuple[str, ...] = ()) -> Any:
        scheduled = {request.request_id: count} if count else {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(preempted),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled), num_computed_tokens=[begin] * len(scheduled)
            ),
            scheduled_new_reqs=[],
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (table,)),
        )
        return self.store.saves.plan(output)  # type: ignore[arg-type]

    def report(self, *invalid: int) -> set[str]:
        output = SimpleNamespace(finished_recving=None, invalid_block_ids=set(invalid))
        self.receives.report(output)  # type: ignore[arg-type]
        return output.finished_recving or set()


def loaded(load: Load, num_valid: int, rank: int = 0, reason: str = "") -> Loaded:
    return Loaded(
        rank=rank, load_id=load.load_id, num_valid=num_valid, num_bytes=0, num_chunks=0, wall=0.0, reason=reason
    )


def prompt(num_tokens: int, name: str = "r", first: int = 0) -> Request:
    return Request(name, list(range(first, first + num_tokens)))


# ---- loads ---------------------------------------------------------------------------------------------------------


def test_a_miss_asks_nobody_and_waits_for_nothing() -> None:
    engine = Engine()
    request = prompt(100)
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.ask(request) == (0, False)
    assert engine.member.sent == []


def test_a_hit_is_loaded_into_the_blocks_that_the_engine_lacks() -> None:
    """One of the prompt's blocks is there: the first chunk's second half is loaded, and the incomplete last chunk."""
    engine, request = Engine(), prompt(100)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.ask(request, BLOCK) == (96 - BLOCK, True)
    engine.allocate(request, [7, 11, 12, 13, 14, 15, 16], 96 - BLOCK)
    (load,) = engine.member.of(Load)
    assert (load.skip_blocks, load.num_blocks, load.block_ids) == (1, [2, 2, 2], [11, 12, 13, 14, 15])
    engine.receives.rank_loaded(loaded(load, 5))
    assert engine.report() == {"r"} and engine.report() == set(), "reported exactly once"
    assert engine.ask(request, 96) == (0, False)


def test_a_whole_prompt_may_come_from_the_store() -> None:
    """vLLM recomputes its last token by itself."""
    engine, request = Engine(), prompt(64)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.ask(request) == (64, True)


def test_no_message_names_more_chunks_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank drops one that does, and its load would never end. The rest of such a prompt is computed."""
    from pdxfer.connector.chunks import MAX_CHUNKS
    from pdxfer.wire.halves import ToWorker
    from pdxfer.wire.version import Decoder, encode

    most = [bytes(32)] * (MAX_CHUNKS + 1)
    load = Load(load_id="l", keys=most, num_blocks=[0] * len(most), skip_blocks=0, block_ids=[], timeout_s=1.0)
    assert Decoder(ToWorker).decode(encode(load)) == load  # type: ignore[arg-type]
    monkeypatch.setattr("pdxfer.connector.chunks.MAX_CHUNKS", 2)
    engine, request = Engine(), prompt(120)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    end, _ = engine.ask(request)
    assert end == 64, "the incomplete chunk at its end does not follow them"
    engine.allocate(request, [1, 2, 3, 4, 5, 6, 7, 8], end)
    (load,) = engine.member.of(Load)
    assert len(load.keys) == 2 and load.block_ids == [1, 2, 3, 4]


def test_a_short_load_is_a_verdict_block_exact_and_then_a_report() -> None:
    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    engine.ask(request)
    engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
    (load,) = engine.member.of(Load)
    engine.receives.rank_loaded(loaded(load, 2, reason="gone"))
    assert engine.report() == set(), "no report before the verdict"
    verdict = engine.receives.take_verdicts(SimpleNamespace(num_scheduled_tokens={}))  # type: ignore[arg-type]
    assert verdict == (3, 4, 5, 6)
    assert engine.report(*verdict) == {"r"}


def test_a_key_that_is_said_to_be_there_and_never_is_ends_in_computing() -> None:
    """At most three loads; the mirror is not believed for ever."""
    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    rounds = 0
    while engine.ask(request) != (0, False):
        rounds += 1
        engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
        engine.receives.rank_loaded(loaded(engine.member.of(Load)[-1], 0, reason="gone"))
        verdict = engine.receives.take_verdicts(SimpleNamespace(num_scheduled_tokens={}))  # type: ignore[arg-type]
        assert engine.report(*verdict) == {"r"}
    assert rounds == 3


def test_an_aborted_load_is_reported_at_once_and_its_blocks_come_back_when_it_is_quiet() -> None:
    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    engine.ask(request)
    engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
    engine.receives.request_over(request)  # type: ignore[arg-type]
    assert engine.pool.held == [1, 2, 3, 4, 5, 6] and len(engine.member.of(Unload)) == 1
    assert engine.report() == {"r"}
    assert engine.pool.held == [1, 2, 3, 4, 5, 6], "a chunk may still be written into them"
    engine.receives.rank_loaded(loaded(engine.member.of(Load)[0], 2, reason="stopped"))
    assert engine.report() == set() and engine.pool.held == []


def test_a_load_that_never_ends_is_taken_back_at_its_deadline() -> None:
    engine, request = Engine(load_timeout_s=2.0), prompt(96)
    engine.hold(engine.keys(request))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    engine.ask(request)
    engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
    engine.clock.advance(3.5)
    engine.receives.check_deadlines(engine.clock.now())
    assert len(engine.member.of(Unload)) == 1


def test_all_ranks_or_none() -> None:
    """A chunk that one of two ranks lacks is no hit; a load is as good as its worst rank."""
    engine, request = Engine(world_size=2), prompt(96)
    chunks = engine.keys(request)
    engine.hold(chunks)
    engine.store.mirror.apply(Held(rank=1, tier="dram", removed=[chunks[2][1].key]))
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.ask(request) == (64, True)
    engine.allocate(request, [1, 2, 3, 4], 64)
    loads = {rank: message for rank, message in engine.member.sent if isinstance(message, Load)}
    assert loads[0].keys != loads[1].keys
    engine.receives.rank_loaded(loaded(loads[0], 4, rank=0))
    engine.receives.rank_loaded(loaded(loads[1], 2, rank=1, reason="gone"))
    verdict = engine.receives.take_verdicts(SimpleNamespace(num_scheduled_tokens={}))  # type: ignore[arg-type]
    assert verdict == (3, 4)


@pytest.mark.parametrize(
    "config",
    [{"tiers": [TierConfig(url="dram:"), TierConfig(url="redis://h")]}, {"shared_memory": "/run/store.sock"}],
)
def test_tiers_that_others_write_are_asked_and_waited_for_until_the_deadline(config: dict[str, Any]) -> None:
    engine, request = Engine(lookup_timeout_s=0.2, **config), prompt(96)
    engine.hold(engine.keys(request)[:1])
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    (find,) = engine.member.of(Find)
    assert len(find.keys) == 2 and engine.ask(request) == (None, False)
    engine.store.apply(Found(rank=0, find_id=find.find_id, num_keys=1))
    assert engine.ask(request) == (64, True)
    late = prompt(96, "late", first=5000)
    engine.store.on_new_request(late)  # type: ignore[arg-type]
    assert engine.ask(late) == (None, False)
    engine.clock.advance(0.3)
    assert engine.ask(late) == (0, False)


def test_a_request_that_has_to_wait_is_brought_closer_and_forgotten_when_it_goes() -> None:
    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request), "disk")
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    engine.store.lookups.step_over()
    engine.store.lookups.step_over()
    engine.store.request_over(request, [])  # type: ignore[arg-type]
    assert [(p.on, len(p.keys)) for p in engine.member.of(Prefetch)] == [(True, 3), (False, 0)]


def test_a_hundred_thousand_lookups_leave_nothing_behind() -> None:
    """Aborted before, during and after the load."""
    engine = Engine()
    base = prompt(96)
    engine.hold(engine.keys(base))
    for index in range(100_000):
        request = prompt(96, f"r{index}")
        engine.store.on_new_request(request)  # type: ignore[arg-type]
        if index % 3:
            engine.ask(request)
            engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
        if index % 3 == 2:
            engine.receives.rank_loaded(loaded(engine.member.sent[-1][1], 6))
        engine.receives.request_over(request)  # type: ignore[arg-type]
        engine.store.request_over(request, [])  # type: ignore[arg-type]
        if index % 3 == 1:
            load = next(m for _, m in engine.member.sent if isinstance(m, Load))
            engine.receives.rank_loaded(loaded(load, 1, reason="stopped"))
        engine.report()
        engine.member.sent.clear()
    assert engine.pool.held == [] and not engine.receives.unsettled
    assert not engine.store.loads._pending and not engine.store.lookups._lookups and not engine.receives._by_request


# ---- saves ---------------------------------------------------------------------------------------------------------


def test_chunks_are_planned_when_they_are_complete_and_held_until_copied() -> None:
    engine, request = Engine(), prompt(100)
    table = [1, 2, 3, 4, 5, 6, 7]
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    first = engine.step(request, 0, 40, table)
    rest = engine.step(request, 40, 60, table)
    assert [p.block_ids for p in (*first, *rest)] == [(1, 2), (3, 4), (5, 6)]
    assert [p.num_tokens for p in rest] == [32, 32]
    assert engine.pool.held == [1, 2, 3, 4, 5, 6] and engine.store.saves.must_step
    ids = [p.save_id for p in (*first, *rest)]
    engine.store.apply(Saved(rank=0, save_ids=ids, num_bytes=1, num_dropped=0))
    assert engine.pool.held == [] and not engine.store.saves.must_step


def test_what_the_tiers_have_is_not_saved_again() -> None:
    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request)[:2])
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    plans = engine.step(request, 0, 96, [1, 2, 3, 4, 5, 6])
    assert [p.block_ids for p in plans] == [(5, 6)]


def test_two_equal_prompts_in_one_step_are_saved_once() -> None:
    engine, one, two = Engine(), prompt(64, "one"), prompt(64, "two")
    for request in (one, two):
        engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert len(engine.step(one, 0, 64, [1, 2, 3, 4])) == 2
    assert len(engine.step(two, 0, 64, [1, 2, 3, 4])) == 0


@pytest.mark.parametrize(("decoded", "tail"), [(True, [(3, 4)]), (False, [])])
def test_what_was_generated_is_saved_at_the_end_of_the_turn(decoded: bool, tail: list[tuple[int, ...]]) -> None:
    """40 tokens of prompt, 30 generated: 69 are final; the chunk [32, 64) is complete."""
    engine = Engine(save_decoded=decoded)
    request = Request("r", list(range(40)))
    table = [1, 2, 3, 4, 5]
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert [p.block_ids for p in engine.step(request, 0, 40, table)] == [(1, 2)]
    request.all_token_ids += list(range(900, 930))
    request.num_computed_tokens = 69
    engine.store.request_over(request, table)  # type: ignore[arg-type]
    assert [p.block_ids for p in engine.step(request, 0, 0, table)] == tail


def test_saves_that_find_no_room_are_tried_again_and_counted_at_the_end() -> None:
    engine, request = Engine(max_pending_saves=1), prompt(128)
    table = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    (one,) = engine.step(request, 0, 128, table)
    engine.store.apply(Saved(rank=0, save_ids=[one.save_id], num_bytes=1, num_dropped=0))
    (two,) = engine.step(request, 128, 1, table)
    assert (one.block_ids, two.block_ids) == ((1, 2), (3, 4))
    request.num_computed_tokens = 128
    request.all_token_ids.append(7)
    engine.store.request_over(request, table)  # type: ignore[arg-type]
    assert engine.store.take_counters()["dropped_saves"] == 2


def test_a_preempted_request_is_saved_as_far_as_its_blocks_are_still_there() -> None:
    """Policy second_sight has not saved it; blocks 5 and 6 were handed out again in the same step."""
    engine, request = Engine(save="second_sight"), prompt(112)
    table = [1, 2, 3, 4, 5, 6, 7]
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.step(request, 0, 112, table) == ()
    engine.pool.blocks[5].ref_cnt = 1
    plans = engine.step(request, 0, 0, [], preempted=("r",))
    assert [p.block_ids for p in plans] == [(1, 2), (3, 4)]
    assert engine.store.saves.holds_blocks


def test_second_sight_saves_a_prefix_when_it_comes_again() -> None:
    engine, one, two = Engine(save="second_sight"), prompt(64, "one"), prompt(64, "two")
    for request, count in ((one, 0), (two, 2)):
        engine.store.on_new_request(request)  # type: ignore[arg-type]
        assert len(engine.step(request, 0, 64, [1, 2, 3, 4])) == count


def test_on_gpu_eviction_saves_what_the_pool_hands_out_next() -> None:
    """Remembered until one of its blocks heads the free queue, unless it holds something else by then."""
    engine, request = Engine(save="on_gpu_eviction"), prompt(64)
    head = SimpleNamespace(block_id=-1, next_free_block=None)
    engine.pool.free_block_queue = SimpleNamespace(fake_free_list_head=head)  # type: ignore[attr-defined]
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.step(request, 0, 64, [1, 2, 3, 4]) == ()
    engine.pool.blocks[3].block_hash = "other"
    tail = SimpleNamespace(block_id=-1, next_free_block=None)
    for block_id, after in ((4, tail), (2, engine.pool.blocks[4])):
        engine.pool.blocks[block_id].next_free_block = after
    head.next_free_block = engine.pool.blocks[2]
    assert [p.block_ids for p in engine.step(request, 64, 1, [1, 2, 3, 4])] == [(1, 2)]


def test_every_rank_has_to_copy_before_blocks_come_back() -> None:
    engine, request = Engine(world_size=2), prompt(32)
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    (plan,) = engine.step(request, 0, 32, [1, 2])
    assert len(set(plan.keys)) == 2
    engine.store.apply(Saved(rank=1, save_ids=[plan.save_id], num_bytes=1, num_dropped=0))
    assert engine.pool.held == [1, 2]
    engine.store.apply(Saved(rank=0, save_ids=[plan.save_id], num_bytes=1, num_dropped=0))
    assert engine.pool.held == []


@pytest.mark.parametrize(
    ("params", "tenant"),
    [({"pdxfer": {"tenant": "red"}}, "red"), (None, ""), ({"pdxfer": 3}, ""), ({"pdxfer": {"tenant": "x" * 129}}, "")],
)
def test_a_save_names_the_tenant_of_its_request(params: Any, tenant: str) -> None:
    engine, request = Engine(), prompt(32)
    request.kv_transfer_params = params
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert [plan.tenant for plan in engine.step(request, 0, 32, [1, 2])] == [tenant]


@pytest.mark.parametrize("policy", ["computed", "none"])
def test_no_count_goes_back(policy: str) -> None:
    """A whole chunk of which vLLM says at the end that its last token is not final: of a request that samples nothing,
    or that ends as it is preempted. Prometheus takes no negative increase, and vLLM's API server ends with it."""
    engine = Engine(save=policy)
    for request, computed in ((prompt(64), 64), (prompt(64, "p", first=1000), 0)):
        engine.store.on_new_request(request)  # type: ignore[arg-type]
        engine.step(request, 0, 64, [1, 2, 3, 4])
        request.num_computed_tokens = computed
        engine.store.request_over(request, [1, 2, 3, 4] if computed else [])  # type: ignore[arg-type]
    assert all(value >= 0 for value in engine.store.take_counters().values())


def test_salt_is_part_of_every_key() -> None:
    engine = Engine()
    plain, salted = prompt(64), Request("s", list(range(64)), cache_salt="tenant")
    assert not {c[0].key for c in engine.keys(plain)} & {c[0].key for c in engine.keys(salted)}


# ---- spill ---------------------------------------------------------------------------------------------------------


def test_a_prompt_whose_grant_does_not_come_goes_to_the_store_and_its_blocks_back() -> None:
    """Told to decode only when a tier has all of it; a grant in time changes nothing."""
    from pdxfer.connector.references import References
    from pdxfer.connector.sends import Sends
    from pdxfer.connector.spills import Spills
    from pdxfer.wire.halves import Forget
    from pdxfer.wire.messages import LegFailed

    engine = Engine(save="none", shared_memory="/run/store.sock")
    facts = engine.receives._facts
    references = References()
    references.bind(engine.pool)  # type: ignore[arg-type]
    sends = Sends(facts, engine.member, references)  # type: ignore[arg-type]
    spills = Spills(sends, engine.store.saves, 2.0)
    for name, granted in (("late", False), ("granted", True)):
        request = prompt(100, name, first=0 if granted else 1000)
        request.kv_transfer_params = {"pdxfer": {"tenant": name}}
        engine.store.on_new_request(request)  # type: ignore[arg-type]
        sends.begin(request, f"t-{name}", 120.0)  # type: ignore[arg-type]
        send = sends.get(f"t-{name}")
        assert send is not None
        send.held, send.num_planned, send.granted = [1, 2, 3, 4, 5, 6, 7], 7, granted
        references.take(send.held)
        chunks = engine.store.chunks(request)  # type: ignore[arg-type]
        assert chunks is not None and sends.request_over(request) is send  # type: ignore[arg-type]
        spills.request_over(send, chunks, 0.0)
    spills.check(1.9)
    assert engine.step(prompt(1, "x"), 0, 0, []) == ()
    spills.check(2.0)
    plans = engine.step(prompt(1, "x"), 0, 0, [])
    assert [(p.block_ids, p.reserved) for p in plans] == [((1, 2), True), ((3, 4), True), ((5, 6), True)]
    assert {p.tenant for p in plans} == {"late"}
    for plan in plans:
        spills.check(3.0)
        assert not any(isinstance(m, LegFailed) for m in engine.member.router)
        engine.store.apply(Saved(rank=0, save_ids=[plan.save_id], num_bytes=1, num_dropped=0))
    spills.check(3.0)
    (told,) = [m for m in engine.member.router if isinstance(m, LegFailed)]
    assert told.transfer_id == "t-late" and "in the store" in told.reason and spills.num_spilled == 1
    assert [m.transfer_id for m in engine.member.of(Forget)] == ["t-late"]
    sends.rank_settled(sends.get("t-late"), 0, False, "")  # type: ignore[arg-type]
    assert [engine.pool.blocks[i].ref_cnt for i in (1, 7)] == [1, 1], "only the granted prompt holds them"


@pytest.mark.parametrize("is_saved_before", [True, False])
def test_a_grant_that_comes_while_its_prompt_is_spilled_leaves_nothing_behind(is_saved_before: bool) -> None:
    from pdxfer.connector.spills import Spills
    from pdxfer.connector.transfer import Send

    engine, request = Engine(save="none", shared_memory="/run/store.sock"), prompt(32)
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    send = Send(
        request_id="r", transfer_id="t", num_tokens=32, total_blocks=2, token_digest=b"", world_size=1, deadline=120.0,
        held=[1, 2],
    )  # fmt: skip
    spills = Spills(SimpleNamespace(end=pytest.fail), engine.store.saves, 0.0)  # type: ignore[arg-type]
    spills.request_over(send, engine.store.chunks(request), 0.0)  # type: ignore[arg-type]
    spills.check(0.0)
    (plan,) = engine.step(prompt(1, "x"), 0, 0, [])
    saved = Saved(rank=0, save_ids=[plan.save_id], num_bytes=1, num_dropped=0)
    if is_saved_before:
        engine.store.apply(saved)
    send.granted = True
    spills.check(1.0)
    if not is_saved_before:
        engine.store.apply(saved)
    assert not engine.store.saves._spilled and not spills._waiting and engine.pool.held == []


def test_a_spill_that_no_tier_takes_is_held_until_the_deadline() -> None:
    from pdxfer.connector.spills import Spills
    from pdxfer.connector.transfer import Send

    engine, request = Engine(save="none", shared_memory="/run/store.sock"), prompt(32)
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    send = Send(
        request_id="r", transfer_id="t", num_tokens=32, total_blocks=2, token_digest=b"", world_size=1, deadline=120.0,
        held=[1, 2],
    )  # fmt: skip
    spills = Spills(SimpleNamespace(end=pytest.fail), engine.store.saves, 0.0)  # type: ignore[arg-type]
    chunks = engine.store.chunks(request)  # type: ignore[arg-type]
    assert chunks is not None
    spills.request_over(send, chunks, 0.0)
    spills.check(0.0)
    (plan,) = engine.step(prompt(1, "x"), 0, 0, [])
    engine.store.apply(Saved(rank=0, save_ids=[plan.save_id], num_bytes=0, num_dropped=1))
    spills.check(1.0)
    assert spills.num_spilled == 0


def test_what_is_spilled_is_planned_whatever_our_own_tiers_have() -> None:
    """The mirror tells of memory that decode may not reach, and a save that is under way may end up there only."""
    engine, request = Engine(tiers=[TierConfig(url="dram:"), TierConfig(url="redis://h")]), prompt(96)
    engine.hold(engine.keys(request)[:1])
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    (ordinary,) = engine.step(request, 0, 64, [1, 2, 3, 4])
    chunks = engine.store.chunks(request)
    assert chunks is not None
    save_ids = engine.store.saves.spill(chunks.full(96), [1, 2, 3, 4, 5, 6])
    plans = engine.step(prompt(1, "x"), 0, 0, [])
    assert [(plan.block_ids, plan.reserved) for plan in plans] == [((1, 2), True), ((3, 4), True), ((5, 6), True)]
    for plan in (ordinary, *plans):
        assert engine.store.saves.spilled(save_ids) is None
        engine.store.apply(Saved(rank=0, save_ids=[plan.save_id], num_bytes=1, num_dropped=0))
    assert engine.store.saves.spilled(save_ids) is True and engine.pool.held == []


def test_a_prompt_without_a_chunk_is_not_spilled() -> None:
    """There is nothing of it that decode could find."""
    from pdxfer.connector.spills import Spills
    from pdxfer.connector.transfer import Send

    engine, request = Engine(partial_chunks=False, shared_memory="/run/store.sock"), prompt(20)
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    send = Send(
        request_id="r", transfer_id="t", num_tokens=20, total_blocks=2, token_digest=b"", world_size=1, deadline=120.0,
        held=[1, 2],
    )  # fmt: skip
    spills = Spills(SimpleNamespace(end=lambda *_: pytest.fail("ended")), engine.store.saves, 0.0)  # type: ignore[arg-type]
    chunks = engine.store.chunks(request)  # type: ignore[arg-type]
    assert chunks is not None
    spills.request_over(send, chunks, 0.0)
    for now in (0.0, 1.0, 2.0):
        spills.check(now)
    assert spills.num_spilled == 0


# ---- store and wire together ---------------------------------------------------------------------------------------


def paired(engine: Engine, request: Request) -> Any:
    """A decode leg whose prefill has started."""
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    engine.receives.begin(request, "t", 60.0 + engine.clock.now())  # type: ignore[arg-type]
    receive = engine.receives.get("t")
    assert receive is not None
    receive.started("p0")
    return receive


def test_what_decode_has_in_its_tiers_is_not_sent_by_prefill() -> None:
    """The grant begins where the store ends; the receive lands when both have."""
    from pdxfer.wire.halves import Expect, Landed
    from pdxfer.wire.messages import Grant

    engine, request = Engine(), prompt(100)
    engine.hold(engine.keys(request)[:2])
    receive = paired(engine, request)
    assert engine.ask(request) == (100, True)
    engine.allocate(request, [1, 2, 3, 4, 5, 6, 7], 100)
    (load,), (expect,) = engine.member.of(Load), engine.member.of(Expect)
    (grant,) = [m for m in engine.member.router if isinstance(m, Grant)]
    assert load.block_ids == [1, 2, 3, 4]
    assert (expect.first_block, expect.block_ids) == (grant.first_block, grant.block_ids) == (4, [5, 6, 7])
    landed = Landed(rank=0, transfer_id="t", epoch=1, num_units=1, num_bytes=1, channel="tcp", wall=0.0)
    engine.receives.rank_landed(receive, landed)
    assert engine.report() == set()
    engine.receives.rank_loaded(loaded(load, 4))
    assert engine.report() == {"r"}


def test_a_transfer_that_fails_is_filled_from_the_store_before_anything_is_computed() -> None:
    """direct → store → recompute: the wire brought one block, the store has the rest of the whole chunks."""
    from pdxfer.wire.halves import Fenced

    engine, request = Engine(), prompt(100)
    receive = paired(engine, request)
    assert engine.ask(request) == (100, True)
    engine.allocate(request, [1, 2, 3, 4, 5, 6, 7], 100)
    engine.hold(engine.keys(request))
    fenced = Fenced(rank=0, transfer_id="t", epoch=1, num_valid=1, reason="peer lost")
    engine.receives.rank_fenced(receive, fenced)
    (load,) = engine.member.of(Load)
    assert (load.skip_blocks, load.block_ids) == (1, [2, 3, 4, 5, 6])
    engine.receives.rank_loaded(loaded(load, 5))
    verdict = engine.receives.take_verdicts(SimpleNamespace(num_scheduled_tokens={}))  # type: ignore[arg-type]
    assert verdict == (7,), "only the last, incomplete block is computed"
    assert engine.report(*verdict) == {"r"}


def test_a_prompt_that_the_store_has_whole_is_not_sent_at_all() -> None:
    from pdxfer.wire.messages import CancelGrant, Grant

    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request))
    paired(engine, request)
    engine.ask(request)
    engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
    kinds = [type(message) for message in engine.member.router]
    assert CancelGrant in kinds and Grant not in kinds
    engine.receives.rank_loaded(loaded(engine.member.of(Load)[0], 6))
    assert engine.report() == {"r"}


def test_a_decode_leg_that_the_store_does_not_know_is_transferred_all_the_same() -> None:
    from pdxfer.wire.halves import Expect

    engine, request = Engine(), prompt(96)
    engine.store.grid.identities.clear()
    paired(engine, request)
    assert engine.ask(request) == (96, True)
    engine.allocate(request, [1, 2, 3, 4, 5, 6], 96)
    assert engine.member.of(Expect)[0].block_ids == [1, 2, 3, 4, 5, 6] and not engine.member.of(Load)


def test_a_lost_router_leaves_nobody_waiting_for_its_word() -> None:
    """A Started that died with the router: computed at once. A Grant: taken back after a while, and then computed."""
    from pdxfer.wire.halves import Revoke

    engine, waiting, granted = Engine(), prompt(96, "w"), prompt(100, "g")
    engine.store.grid.identities.clear()
    engine.receives.begin(waiting, "t-w", 60.0 + engine.clock.now())  # type: ignore[arg-type]
    assert engine.ask(waiting) == (None, False)
    paired(engine, granted)
    assert engine.ask(granted) == (100, True)
    engine.allocate(granted, [1, 2, 3, 4, 5, 6, 7], 100)
    engine.receives.router_lost(engine.clock.now())
    assert engine.ask(waiting) == (0, False)
    engine.receives.check_deadlines(engine.clock.now())
    assert not engine.member.of(Revoke), "it may be under way"
    engine.clock.advance(10.0)
    engine.receives.check_deadlines(engine.clock.now())
    assert [revoke.transfer_id for revoke in engine.member.of(Revoke)] == ["t"]


def test_a_lost_router_leaves_no_prompt_waiting_for_its_grant() -> None:
    """Decode may have given up with nobody to tell prefill so: its blocks come back after a while, not at the end of
    the request's time."""
    from pdxfer.connector.references import References
    from pdxfer.connector.sends import Sends
    from pdxfer.wire.halves import Forget

    engine, request = Engine(), prompt(100)
    references = References()
    references.bind(engine.pool)  # type: ignore[arg-type]
    sends = Sends(engine.receives._facts, engine.member, references)  # type: ignore[arg-type]
    sends.begin(request, "t", 120.0 + engine.clock.now())  # type: ignore[arg-type]
    send = sends.get("t")
    assert send is not None
    send.num_planned = send.total_blocks
    sends.request_over(request)  # type: ignore[arg-type]
    sends.router_lost(engine.clock.now())
    sends.check_deadlines(engine.clock.now())
    assert not engine.member.of(Forget), "its grant may be under way"
    engine.clock.advance(10.0)
    sends.check_deadlines(engine.clock.now())
    assert [forget.transfer_id for forget in engine.member.of(Forget)] == ["t"]


def test_a_request_that_comes_after_its_router_was_lost_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on its way here when the router that paired it died, so the loss was told before it was there."""
    from pdxfer.connector import scheduler_half
    from pdxfer.connector.member import EngineFacts

    class OfflineMember(Member):
        is_connected = False

        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self.presence, self.free_blocks = SimpleNamespace(arrived=lambda name: None), 0

        def leg_begins(self, *_: Any) -> None: ...

    monkeypatch.setattr(scheduler_half, "Member", OfflineMember)
    facts = EngineFacts(
        model="m", served_names=["m"], num_blocks=64, block_size=BLOCK, max_model_len=4096, world_size=1,
        max_step_blocks=4, plans_ready_hits=True,
    )  # fmt: skip
    settings = SimpleNamespace(store=StoreConfig(), engine_id="e", max_resumes=1, role="decode", max_deadline_s=120.0)
    clock = FakeClock()
    half = scheduler_half.SchedulerHalf(settings, facts, clock)  # type: ignore[arg-type]
    decode, prefill = prompt(100, "d"), prompt(100, "p")
    decode.kv_transfer_params = {"pdxfer": {"transfer_id": "t-d", "deadline_s": 120.0}}
    prefill.kv_transfer_params = {"pdxfer": {"transfer_id": "t-p", "leg": "prefill", "deadline_s": 120.0}}
    for request in (decode, prefill):
        half.on_new_request(request)  # type: ignore[arg-type]
    assert half.matched_tokens(decode, 0) == (0, False), "prefill's start is waited for"  # type: ignore[arg-type]
    send = half._sends.get("t-p")
    assert send is not None and send.deadline <= clock.now() + 10.0, "its blocks would be held for all its time"


def test_after_a_reset_nothing_that_was_stored_is_found() -> None:
    """Weights changed under the engine: running requests save nothing more, new ones have other keys."""
    engine, request = Engine(), prompt(96)
    engine.hold(engine.keys(request))
    running = prompt(64, "running")
    engine.store.on_new_request(running)  # type: ignore[arg-type]
    engine.store.reset()
    assert engine.step(running, 0, 64, [1, 2, 3, 4]) == ()
    engine.store.on_new_request(request)  # type: ignore[arg-type]
    assert engine.ask(request) == (0, False)


@pytest.mark.parametrize("salt", ["", "tenant-a"])
@pytest.mark.parametrize("lora", ["", "/adapters/sql"])
def test_operators_name_a_prompts_chunks_as_the_engine_does(salt: str, lora: str) -> None:
    """Salt and LoRA adapter included: vLLM's own extra keys on the one side, the management API's on the other."""
    from pdxfer.connector.chunks import Grid, PromptChunks
    from pdxfer.connector.requests import adapter_digest
    from pdxfer.node.verbs import Cut
    from pdxfer.wire.manage import StoreArgs

    adapter = SimpleNamespace(lora_name="sql", lora_path=lora, name="sql", path=lora) if lora else None
    tokens = list(range(200))
    request = Request("r", tokens, cache_salt=salt or None, lora_request=adapter)
    grid = Grid(
        chunk_tokens=32, block_size=16, scheme="blake3", with_partial=False, world_size=1, identities={0: IDENTITY}
    )
    engine = [chunk[0].key for chunk in PromptChunks(request, grid).full(len(tokens))]  # type: ignore[arg-type]
    cut = Cut(chunk_tokens=32, block_size=16, scheme="blake3", with_partial=False, adapter=adapter_digest)
    assert cut.keys(StoreArgs(tokens=tokens, salt=salt, adapter=lora), IDENTITY) == engine and len(engine) == 6
