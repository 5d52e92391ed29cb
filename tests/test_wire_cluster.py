"""Codecs on the wire from proxy to fake decode engine, which checks every byte against what the prompt implies."""

import asyncio
import json
from typing import Any

import pytest
from test_proxy_cluster import ANSWER, STREAM, Cluster, cluster, until

from pdxfer.codec.frame import FrameError
from pdxfer.node import recompute
from pdxfer.node.recompute import CHEAPER
from pdxfer.node.wire import Wire
from pdxfer.node.wire_sender import WireSender
from pdxfer.router.events import Tell
from pdxfer.wire.manage import SetWire


def wire(name: str) -> str:
    """Section `codec` for one codec on the wire."""
    return json.dumps({"wire": name})


PAIR = {"p0": "prefill", "d0": "decode"}


def wire_of(c: Cluster, engine_id: str) -> Wire:
    wire = c.engines[engine_id].member._node.wire
    assert wire is not None
    return wire


@pytest.mark.parametrize("codec", ["lossless", "int8", "fp8", "zstd"])
async def test_answers_are_right_and_the_kv_came_in_frames(codec: str) -> None:
    """Bit for bit with the lossless ones; near, by the fake's own check, with the lossy ones."""
    async with cluster(PAIR, codec=wire(codec)) as c:
        for number in range(3):
            text, header = await c.ask(STREAM, f"q{number}")
            assert text == ANSWER and header.startswith("mode=pair; ")
        sent, taken = wire_of(c, "p0").counts(), wire_of(c, "d0").staging
        assert sent["wire_frames"] == taken.num_frames > 0 and not taken.num_bad
        assert codec == "zstd" or sent["wire_saved_bytes"] > 0


async def test_a_bad_frame_costs_time_never_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode computes from the bad chunk on; the next request goes well."""
    async with cluster(PAIR, codec=wire("lossless")) as c:
        staging = wire_of(c, "d0").staging
        decode, calls = staging._frames.decode, [0]

        def second_is_bad(frame: memoryview, unit: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise FrameError("the payload's checksum is wrong")
            return decode(frame, unit)

        monkeypatch.setattr(staging._frames, "decode", second_is_bad)
        assert (await c.ask(STREAM, "q1"))[0] == ANSWER
        assert staging.num_bad == 1
        assert (await c.ask(STREAM, "q2"))[0] == ANSWER


async def test_a_client_that_leaves_in_mid_transfer_leaves_no_slot_behind() -> None:
    async with cluster(PAIR, **{"codec": wire("lossless"), "prefill-tokens-per-s": 5000}) as c:
        ring = wire_of(c, "d0").staging._ring
        asking = asyncio.create_task(c.ask(STREAM, "q1"))
        await until(lambda: ring._shares)
        asking.cancel()
        await asyncio.wait([asking])
        for engine in c.engines.values():
            await until(lambda engine=engine: engine.member.is_idle)
        await until(lambda: len(ring._free) == ring.num_slots and not ring._shares)
        ring.check()
        assert (await c.ask(STREAM, "q2"))[0] == ANSWER


async def test_the_live_switch_turns_frames_off_and_the_heartbeat_says_so() -> None:
    async with cluster(PAIR, codec=wire("lossless")) as c:
        states = lambda: {rank.wire for e in c.router.snapshot().engines for rank in e.ranks}  # noqa: E731
        await until(lambda: states() == {"on"})
        for number in range(20):  # on a busy machine credits may come later than a prompt is sent
            assert (await c.ask(STREAM, f"q{number}"))[0] == ANSWER
            if frames := wire_of(c, "p0").counts()["wire_frames"]:
                break
        for engine_id in PAIR:
            c.router.operate(Tell(engine_id, SetWire(is_on=False)))
        await until(lambda: states() == {"off"})
        assert (await c.ask(STREAM, "last"))[0] == ANSWER
        assert wire_of(c, "p0").counts()["wire_frames"] == frames > 0


async def test_many_prompts_at_once_share_the_slots() -> None:
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    async with cluster(roles, **{"codec": wire("lossless"), "num-blocks": 3072}) as c:  # room for all at once
        answers = await asyncio.gather(*(c.ask(STREAM, f"q{n}") for n in range(12)), return_exceptions=True)
        wrong = [a for a in answers if isinstance(a, BaseException) or a[0] != ANSWER]
        assert not wrong, wrong
        ring = wire_of(c, "d0").staging._ring
        await until(lambda: len(ring._free) == ring.num_slots)
        ring.check()


async def test_what_a_slow_link_cannot_bring_in_time_is_computed_by_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer ends early, what came is kept, nobody is asked to send it again, and the answer is right."""
    monkeypatch.setattr(recompute, "TRIAL_BYTES", 1 << 20)
    make = Wire.sender

    def over_a_slow_link(wire: Wire, engine_id: str) -> WireSender:
        sender = make(wire, engine_id)
        link = sender._chooser.link
        link.begin = link.end = lambda *_: None  # type: ignore[method-assign]
        link.bytes_per_s = 1000.0
        sender._recompute.tokens_per_s = 1000.0  # until the first credit: it may come later than all units are sent
        return sender

    monkeypatch.setattr(Wire, "sender", over_a_slow_link)
    async with cluster({"p0": "prefill", "p1": "prefill", "d0": "decode"}, codec=wire("auto")) as c:
        decode = c.engines["d0"].member
        assert decode._node.wire is not None
        await decode._compute.alone(list(range(512)))
        assert decode._node.wire.staging.steps.tokens_per_s > 0, "it has measured itself"
        assert (await c.ask(STREAM, "q1"))[0] == ANSWER
        counts = decode._link.counts
        assert counts["recomputed_blocks"] > 0 and counts["resumed_transfers"] == 0
        await until(lambda: any(event.kind == "fell_back" for event in c.router.events()))
        (fell_back,) = [event for event in c.router.events() if event.kind == "fell_back"]
        assert CHEAPER in fell_back.detail["reason"]


async def test_a_tenant_is_that_of_its_api_key_and_can_keep_its_kv_raw() -> None:
    """From the key at the proxy to the prefill engine's choice."""
    codec = json.dumps({"wire": "lossless", "tenants": {"exact": []}})
    async with cluster(PAIR, api_keys={"key-e": "exact", "key-f": "free"}, codec=codec) as c:
        for number in range(3):
            assert (await c.ask(STREAM, f"e{number}", key="key-e"))[0] == ANSWER
        assert wire_of(c, "p0").counts()["wire_frames"] == 0
        for number in range(20):  # on a busy machine credits may come later than a prompt is sent
            assert (await c.ask(STREAM, f"f{number}", key="key-f"))[0] == ANSWER
            if wire_of(c, "p0").counts()["wire_frames"]:
                break
        assert wire_of(c, "p0").counts()["wire_frames"] > 0
