"""The reuse bench without engines: what is asked, options, figures."""

import statistics
from pathlib import Path

import pytest

from pdxfer.bench.reuse import parse
from pdxfer.bench.reuse_arms import ARMS, Place, make_arm
from pdxfer.bench.reuse_measure import Figures, MissOnly, drop_page_cache
from pdxfer.bench.reuse_summary import rows, summary
from pdxfer.bench.reuse_work import FRESH_TOKENS, QUICK, Counts, Workloads, workloads
from pdxfer.bench.texts import Prompts
from pdxfer.core.errors import ConfigError

PLACE = Place(
    model=Path("/model"), port=1, side_port=2, http_port=3, directory=Path("/tier"), lmcache_python="/venv/bin/python"
)


class Words:
    """A tokenizer of one id a word."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [hash(word) for word in text.split()]


@pytest.fixture(scope="module")
def full() -> Workloads:
    return workloads(Prompts(Words()), Counts())


def test_documents_are_asked_round_robin_and_begin_with_what_was_stored(full: Workloads) -> None:
    assert [len(doc) for doc in full.longdoc_store] == [3000] * 4 and len(full.longdoc) == 20
    for place, prompt in enumerate(full.longdoc):
        assert prompt[:3000] == full.longdoc_store[place % 4] and len(prompt) == 3024
    assert len({tuple(prompt[3000:]) for prompt in full.longdoc}) == 5


def test_conversations_grow_to_three_thousand_tokens_in_six_turns(full: Workloads) -> None:
    for opening, turns, count in ((full.chat_store, full.chat, 8), (full.even_store, full.even, 2)):
        assert len(opening) == count and len(turns) == 5 * count
        for talk in range(count):
            lengths = [len(opening[talk]), *(len(turn) for turn in turns[talk::count])]
            assert lengths == sorted(set(lengths)) and lengths[-1] == 3000
            assert all(turns[-count + talk][:length] == turn for length, turn in zip(
                lengths, [opening[talk], *turns[talk::count]], strict=True
            ))  # fmt: skip


def test_a_follow_up_of_a_conversation_adds_what_the_public_trace_says(full: Workloads) -> None:
    share = statistics.median(160 / len(prompt) for prompt in full.chat)
    assert share == pytest.approx(0.064, abs=0.005)
    assert {len(prompt) for prompt in full.even} == {1000, 1500, 2000, 2500, 3000}


def test_a_batch_shares_two_thousand_tokens(full: Workloads) -> None:
    assert len(full.batch) == 64 and all(prompt[:2000] == full.batch_store for prompt in full.batch)
    assert {len(prompt) for prompt in full.batch} == {2050}


def test_new_prompts_share_no_first_block_with_anything_that_was_asked(full: Workloads) -> None:
    asked = [*full.longdoc_store, *full.chat_store, *full.even_store, full.batch_store, *full.long, *full.equal]
    heads = [tuple(prompt[:128]) for prompt in [*asked, *full.fresh, *sum(full.bursts, [])]]
    assert len(set(heads)) == len(heads)
    assert {len(prompt) for prompt in full.fresh} == {FRESH_TOKENS} and len(full.fresh) == len(full.bursts) == 40


def test_speed_ups_are_of_memory_over_no_cache_and_what_was_not_measured_is_none() -> None:
    none = Figures(
        latencies_s={"longdoc": [8.0, 8.0], "chat": [6.0], "even chat": [4.0]},
        batch_s=100.0,
        num_batch=64,
        long_s=[10.0],
    )
    dram = Figures(
        latencies_s={"longdoc": [1.0, 3.0], "chat": [1.5], "even chat": [2.0]}, batch_s=20.0, num_batch=64, long_s=[0.4]
    )
    found = summary(
        {"none": none, "dram": dram},
        MissOnly(
            plain_s=[10.0, 20.0] * 10, stored_s=[10.1, 20.2] * 10, plain_burst_s=[5.0] * 20, stored_burst_s=[5.5] * 20
        ),
    )
    assert found == {
        "warm_dram_3500": 0.04, "warm_disk_3500": None, "vs_lmcache_mp": None, 
        "miss_only_ttft": 1.01, "miss_only_ttft_interval": "1.010..1.010", "miss_only_ttft_verdict": "passed",
        "miss_only_burst": 1.1, "miss_only_burst_interval": "1.100..1.100", "miss_only_burst_verdict": "failed",
        "longdoc_speedup": 4.0, "multiturn_speedup": 4.0, "multiturn_even_speedup": 2.0, "batch_speedup": 5.0,
    }  # fmt: skip
    lines = rows({"none": none}, None)
    assert [line["workload"] for line in lines][-1] == "batch" and lines[-1]["requests_per_s"] == 0.64


def test_every_arm_computes_with_the_same_flags() -> None:
    """Only the cache differs."""
    common = None
    for name in ARMS:
        engine = make_arm(name, PLACE).processes[-1]
        flags = [flag for flag in engine.argv[1:] if "prefix-caching" not in flag]
        if "--kv-transfer-config" in flags:
            at = flags.index("--kv-transfer-config")
            del flags[at : at + 2]
        common = common or (flags, engine.env)
        assert (flags, engine.env) == common, name


def test_lmcache_needs_its_own_python(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it needs --lmcache-python"):
        parse(["--arms", "lmcache-mp"])
    with pytest.raises(ConfigError, match="known are none, prefix-cache, dram, disk, lmcache-mp"):
        parse(["--arms", "sram"])


def test_a_quick_run_has_every_workload() -> None:
    quick = workloads(Prompts(Words()), QUICK)
    assert all(quick.__getattribute__(name) for name in Workloads.__dataclass_fields__)


def test_the_page_cache_is_dropped_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "slab").write_bytes(b"x" * 4096)
    drop_page_cache(tmp_path)
    drop_page_cache(tmp_path / "missing")
    assert (tmp_path / "slab").read_bytes() == b"x" * 4096
