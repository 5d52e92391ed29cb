"""Peers that lie, break off, freeze or are killed: what is read is right or a counted miss, by the deadline."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peer_kit import KEY, Script, half, knows, node_of, peer_id, read, reading, say, scripted, soon, stalls, unit

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.peer import wire
from pdxfer.testing.tier_kit import MIB, until, value_of
from pdxfer.transport.frames import FrameType
from pdxfer.wire.messages import StoreAddress

SCRIPTS: dict[str, tuple[Script, set[str]]] = {
    "cut in the middle": (half, {"unreachable"}),
    "silent in the middle": (stalls, {"timeout"}),
    "silent": (lambda frames: frames.receive_head() and None, {"timeout"}),
    "huge": (lambda frames: frames.sock.sendall(unit(wire.encode(wire.Value(tier="dram")), 1 << 31)), {"damaged"}),
    "beyond all bounds": (lambda frames: frames.sock.sendall(b"\x05\0\0\0" + b"\xff" * 12), {"protocol"}),
    "noise": (lambda frames: frames.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n"), {"protocol"}),
    "another answer": (lambda frames: say(frames, wire.Removed(said=[])), {"protocol"}),
    "malformed": (lambda frames: frames.send(FrameType.CONTROL, b"\x91" * 400), {"protocol"}),
    "refuses": (lambda frames: say(frames, wire.Failed(reason="no")), {"protocol"}),
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_peer_that_misbehaves_is_a_miss_by_the_deadline(name: str) -> None:
    """Nothing is lent in the end, nothing raised, and the reason is counted."""
    script, reasons = SCRIPTS[name]
    with scripted(script) as node:
        async with reading(node) as (tier, _):
            await knows(tier, KEY)
            before, limit_s = SYSTEM_CLOCK.now(), 1.0 if "silent" in name else 30.0
            assert await read(tier, KEY, soon(limit_s)) is None
            assert SYSTEM_CLOCK.now() - before < limit_s + 5.0
            assert set(tier.stats().failures) == reasons
            await until(lambda: tier._pool.lent_bytes == 0, "buffers to come back")


@pytest.mark.slow
async def test_a_peer_that_is_killed_in_the_middle_is_a_miss_and_a_frozen_one_too(tmp_path: Path) -> None:
    """kill -STOP, then -9, while eight readers read: what they get is right or a miss, by the deadline."""
    code = "import peer_kit; peer_kit.serve_until_killed()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        node = node_of(peer_id("peer"), StoreAddress(host="127.0.0.1", port=port))
        async with reading(node) as (tier, _):
            await knows(tier, KEY)
            value, got = value_of("k", 4 * MIB), []

            async def keep_reading() -> None:
                for _ in range(1000):
                    before = SYSTEM_CLOCK.now()
                    got.append(await read(tier, KEY, soon(3.0)))
                    assert SYSTEM_CLOCK.now() - before < 10.0
                    if got[-1] is None:
                        return

            readers = [asyncio.create_task(keep_reading()) for _ in range(4)]
            await until(lambda: len(got) > 8, "some reads")
            process.send_signal(signal.SIGSTOP)
            await asyncio.gather(*readers)
            process.kill()
            assert await tier.lookup([KEY], soon()) == [None]
            assert {one for one in got if one is not None} == {value} and None in got
            await until(lambda: tier._pool.lent_bytes == 0, "buffers to come back")
    finally:
        process.kill()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()
