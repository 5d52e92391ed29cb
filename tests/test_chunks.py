"""Chunk keys: the same in every process, and different for everything that changes KV."""

import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.kv.chunks import chunk_keys, extra_bytes, identity_digest, partial_keys

IDENTITY = identity_digest({"model": "demo", "weights": "00ff"})
PROMPT = list(range(1000, 1600))
GOLDEN = {
    "identity": "07fa089e41bedc873349598a739d8d56",
    "blake3": [
        "7d711a8247635c8e3c44859a11b00e2dda8b010b8a95e14a566939b72488c09d",
        "90d277d3ce252a9beb7e4e1cea2a601c835065ff8b9c9eb584afde32c1cbed26",
        "325503cd0aa23d1f9fef7a04232ea93e07f46c132eaf56f3690cd93dc844eba5",
    ],
    "sha256": [
        "785ac4bc778a7a86eb192a774e394a4a16c27dffd905bc40dfc30e02a952faaf",
        "45094aeeb3557ca83b567e9a76a09818d111630ab51d51596ce2c1d76c679a10",
        "ad8642f4294362fe0975dac470e58fea74a48309a72298f47029859d3584e595",
    ],
    "salted": "f42a31bc2f5794b79d68d2d790541df210410c9ce043bed839de5870aa800036",
}


def keys(token_ids=PROMPT, extras=(), identity=IDENTITY, chunk=256, scheme="blake3", **more):
    return chunk_keys(token_ids, extras, identity, chunk, scheme, block_size=16, **more)


def test_golden_bytes():
    """Keys are a format: other bytes than these would orphan every store there is (bump FORMAT instead)."""
    assert IDENTITY.hex() == GOLDEN["identity"]
    for scheme in ("blake3", "sha256"):
        assert [k.key.hex() for k in keys(scheme=scheme)] == GOLDEN[scheme]
    assert keys(extras=[extra_bytes(("salt", 7, b"x", None, ("img", -1)))])[0].key.hex() == GOLDEN["salted"]


@pytest.mark.slow
def test_three_processes_agree():
    """No seed: interpreters with different hash seeds name the same chunks."""
    code = "import test_chunks as t; print([k.key.hex() for k in t.keys(extras=[b'', b'lora'])])"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert outs == {f"{[k.key.hex() for k in keys(extras=[b'', b'lora'])]}\n".encode()}


def test_chunks_cover_the_prompt_in_whole_blocks():
    """600 tokens: two full chunks and one of the five whole blocks that are left."""
    assert [(k.index, k.first_token, k.num_tokens) for k in keys()] == [(0, 0, 256), (1, 256, 256), (2, 512, 80)]
    assert [k.num_tokens for k in keys(with_partial=False)] == [256, 256]
    assert keys(PROMPT[:15]) == []
    assert [k.num_tokens for k in keys(chunk=16)] == [16] * 37


def test_a_shared_prefix_has_shared_keys_and_a_longer_prompt_finds_the_partial_chunk():
    """The chain names prefixes; what a shorter prompt stored as its last chunk is among the longer one's partials."""
    longer = keys(PROMPT + [5] * 300)
    assert longer[:2] == keys()[:2] and longer[2] != keys()[2]
    candidates = partial_keys(PROMPT + [5] * 300, (), IDENTITY, 256, block_size=16, after=longer[1])
    assert keys()[2] in candidates
    assert [c.num_tokens for c in candidates] == list(range(240, 0, -16))
    assert partial_keys(PROMPT[:600], (), IDENTITY, 256, block_size=16, after=keys()[1])[0] == keys()[2]


def test_the_chain_can_be_continued():
    """A request that grows continues where its last full chunk ended."""
    whole = keys(PROMPT + PROMPT)
    assert whole == keys()[:2] + keys(PROMPT + PROMPT, after=keys()[1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=200), st.integers(0, 10**6), st.sampled_from([16, 32]))
def test_any_token_changes_its_chunk_and_all_after(ids, at, chunk):
    """Nothing before the changed token changes, everything from its chunk on does."""
    at %= len(ids) - len(ids) % 16
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    for a, b in zip(keys(ids, chunk=chunk), keys(other, chunk=chunk), strict=True):
        assert (a.key == b.key) == (a.end <= at)


def test_everything_else_changes_keys():
    """Identity, salt, LoRA, their place, the scheme: each alone is another name."""
    names = [
        keys()[0], keys(scheme="sha256")[0], keys(identity=identity_digest({"model": "demo", "weights": "00fe"}))[0],
        keys(extras=[b"a"])[0], keys(extras=[b"b"])[0], keys(extras=[b"", b"a"])[0], keys(extras=[b"a", b"a"])[0],
    ]  # fmt: skip
    assert len({k.key for k in names}) == len(names)
    assert keys(extras=[b""] * 37) == keys()
    assert keys(array("I", PROMPT)) == keys()


def test_identity_is_order_free_and_unambiguous():
    """Fields by name; no two different sets run together."""
    assert identity_digest({"a": "1", "b": "2"}) == identity_digest({"b": "2", "a": "1"})
    sets = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {}]
    assert len({identity_digest(s) for s in sets}) == len(sets)


def test_extra_keys_are_unambiguous():
    """Types and borders count; what has no stable bytes is refused."""
    tuples = [("a", "b"), ("ab",), (b"ab",), (("a", "b"),), (1,), ("1",), (None,), ("a", None)]
    assert len({extra_bytes(t) for t in tuples}) == len(tuples)
    assert extra_bytes(None) == extra_bytes(()) == b""
    with pytest.raises(TypeError, match="object"):
        extra_bytes((object(),))


def test_wrong_sizes_are_named():
    """What the user set, and what it must divide."""
    with pytest.raises(ValueError, match="chunk_tokens 250 .* block size 16"):
        keys(chunk=250)
    with pytest.raises(ValueError, match="16 bytes"):
        keys(identity=b"short")
