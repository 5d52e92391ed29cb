"""The pairs of the wire bench: a router, a proxy and two fake engines each, KV of the demo model's shape.

Router and proxy run in this process, on the prefill side of the link; engines are processes. Fake engines move real
bytes over real sockets and check samples of them; only computing is replaced by waiting.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdxfer.bench.ttft_arms import Ports, Site
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.config.store import CodecConfig
from pdxfer.proxy.app import Proxy
from pdxfer.proxy.router_link import RouterLink
from pdxfer.proxy.settings import ProxySettings
from pdxfer.router.server import RouterServer, RouterSettings

MODEL = "fake"
NUM_LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 3, 64, 128
"""SmolLM2-135M, the demo model, in bfloat16, in blocks as vLLM's CPU attention has them."""
KV_BYTES_PER_TOKEN = NUM_LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
_READY_S = 60.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all pairs have in common."""

    num_tokens: int
    prefill_tokens_per_s: float
    out: Path


@dataclass(frozen=True, slots=True)
class Pair:
    """One arm, ready."""

    name: str
    url: str
    router: RouterServer

    def counts(self, name: str) -> int:
        """One of the engines' totals, as their heartbeats bring it, over both."""
        totals = [rank.counts for engine in self.router.snapshot().engines for rank in engine.ranks]
        return sum(counts.get(name, 0) for counts in totals)


@asynccontextmanager
async def running(name: str, codec: CodecConfig, site: Site, work: Work) -> AsyncIterator[Pair]:
    """Start one pair; stop it at the end."""
    host = site.prefill_host
    router = RouterServer(
        RouterSettings(bind=f"tcp://{host}:0", min_remote_tokens=64, missed_heartbeats=20, allow_insecure=True)
    )
    router.start()
    settings = ProxySettings(host=host, port=0, router=router.endpoint, allow_insecure=True, drain_timeout_s=0.2)
    proxy = Proxy(
        settings,
        lambda on_message: RouterLink(
            endpoint=settings.router, proxy_id=settings.proxy_id, security=None, on_message=on_message
        ),
    )
    sides = (("prefill", site.prefill_host, site.prefill_prefix), ("decode", site.decode_host, site.decode_prefix))
    engines: list[subprocess.Popen[bytes]] = []
    try:
        ports = Ports.free()
        for role, address, prefix in sides:
            port = ports.prefill if role == "prefill" else ports.decode
            argv = [*prefix, *_argv(name, role, address, port, router.endpoint, codec, work)]
            with (work.out / f"{name}-{role}.log").open("wb") as file:
                engines.append(subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT))
        await proxy.start()
        await _ready(name, router, engines, work.out)
        yield Pair(name, f"http://{host}:{proxy.port}", router)
    finally:
        await proxy.stop()
        for engine in engines:
            engine.terminate()
        for engine in engines:
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(_STOP_S)
            engine.kill()
        router.close()


async def _ready(name: str, router: RouterServer, engines: Sequence[subprocess.Popen[bytes]], out: Path) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while router.snapshot().num_pairs < 1:
                if any(engine.poll() is not None for engine in engines):
                    raise BenchError(f"an engine of {name} ended at its start: see {out}/{name}-*.log")
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise BenchError(f"{name} has no pair after {_READY_S:g} s: see {out}/{name}-*.log") from error


def _argv(name: str, role: str, host: str, port: int, router: str, codec: CodecConfig, work: Work) -> list[str]:
    flags = {
        "role": role,
        "engine-id": f"{name}-{role[0]}",
        "model": MODEL,
        "host": host,
        "port": port,
        "router": router,
        "prefill-tokens-per-s": work.prefill_tokens_per_s,
        "inter-token-ms": 1,
        "block-size": BLOCK_SIZE,
        "num-layers": NUM_LAYERS,
        "kv-heads": KV_HEADS,
        "head-dim": HEAD_DIM,
        "num-blocks": 2 + 2 * -(-work.num_tokens // BLOCK_SIZE),
        "codec": json.dumps({"wire": codec.wire, "allow": codec.allow}),
    }
    argv = [sys.executable, "-m", "pdxfer.testing.fake_engine", "--near"]
    for flag, value in flags.items():
        argv += [f"--{flag}", str(value)]
    return argv
