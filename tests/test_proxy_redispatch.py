"""The proxy's part of a resume: it sends the prefill leg again, once, and speaks for the attempt under way alone."""

import asyncio

import msgspec
from proxy_rig import COMPLETION, Rig, rig

from pdxfer.wire.messages import EngineRef, LegFailed, Redispatch


def redispatch(r: Rig, transfer_id: str, epoch: int = 2) -> Redispatch:
    prefill = EngineRef(engine_id="p1", url=r.prefill.url)
    return Redispatch(transfer_id=transfer_id, epoch=epoch, prefill=prefill, first_missing=16, reason="peer lost")


async def legs(r: Rig, count: int) -> list[dict[str, object]]:
    """Our part of the prefill legs' parameters, once so many have come."""
    async with asyncio.timeout(20):
        while len(r.prefill.counts.seen) < count:
            await asyncio.sleep(0.005)
    return [msgspec.json.decode(seen.body)["kv_transfer_params"]["pdxfer"] for seen in r.prefill.counts.seen]


async def test_a_prefill_leg_is_sent_again_under_the_same_transfer() -> None:
    """The first one, which hangs, is cut off; a repeated or older word sends nothing."""
    async with rig(engine={"inter_token_s": 0.1}) as r:
        r.prefill.faults.hang, r.prefill.faults.num_times = True, 1
        request = asyncio.create_task(r.post("/v1/completions", COMPLETION))
        await legs(r, 1)
        transfer_id = r.pairer.pairings[-1].transfer_id
        r.pairer.on_message(redispatch(r, transfer_id))
        r.pairer.on_message(redispatch(r, transfer_id))
        r.pairer.on_message(redispatch(r, transfer_id, epoch=1))
        first, second = await legs(r, 2)
        assert first["transfer_id"] == second["transfer_id"] == transfer_id and second["leg"] == "prefill"
        assert second["deadline_s"] <= first["deadline_s"]  # type: ignore[operator]
        assert (await request)[0] == 200
        await r.settled()
        assert len(r.prefill.counts.seen) == 2 and r.count("redispatches_total") == 1
        assert not any(isinstance(message, LegFailed) for message in r.pairer.sent)


async def test_the_failure_of_a_second_leg_is_told_with_its_epoch() -> None:
    async with rig(engine={"inter_token_s": 0.1}) as r:
        r.prefill.faults.hang, r.prefill.faults.num_times = True, 1
        request = asyncio.create_task(r.post("/v1/completions", COMPLETION))
        await legs(r, 1)
        r.prefill.faults.hang, r.prefill.faults.num_times, r.prefill.faults.status = False, 1, 500
        r.pairer.on_message(redispatch(r, r.pairer.pairings[-1].transfer_id))
        failed = await r.pairer.wait_for(LegFailed)
        assert isinstance(failed, LegFailed) and (failed.leg, failed.epoch) == ("prefill", 2)
        assert (await request)[0] == 200


async def test_a_leg_of_a_request_that_is_over_is_refused_at_once() -> None:
    """Decode, if it still waits, need not wait for nothing."""
    async with rig() as r:
        r.pairer.on_message(redispatch(r, "t-gone"))
        failed = await r.pairer.wait_for(LegFailed)
        assert isinstance(failed, LegFailed) and (failed.transfer_id, failed.epoch) == ("t-gone", 2)


async def test_the_timeline_tells_who_took_over() -> None:
    async with rig(engine={"inter_token_s": 0.1}) as r:
        r.prefill.faults.hang, r.prefill.faults.num_times = True, 1
        request = asyncio.create_task(r.post("/v1/completions", COMPLETION, {"X-Request-Id": "q"}))
        await legs(r, 1)
        r.pairer.on_message(redispatch(r, r.pairer.pairings[-1].transfer_id))
        await request
        await r.settled()
        _, timeline = await r.get("/v1/pdxfer/timeline/q")
        (resume,) = timeline["resumes"]
        assert (resume["before"], resume["prefill"], resume["first_missing"]) == ("p0", "p1", 16)
        assert r.pairer.served[-1].prefill == "p1" and r.pairer.served[-1].reason == "resumed by p1: peer lost"
