"""A cluster of simulated members around one real router: for the status page, `top` and `status` at size.

`python tests/sim_cluster.py [--engines 8]` serves one with its controller until Ctrl-C, to look at.
"""

import argparse
import heapq
import random
import threading
import time

from router_kit import wait_until

from pdxfer.router.server import RouterServer
from pdxfer.wire.messages import (
    Capacity,
    Ended,
    FromRouter,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Pair,
    Pairing,
    PeerReady,
    ProxyHello,
    Role,
    Served,
    Stamp,
    Started,
    TierReport,
    WorkerHello,
)
from pdxfer.wire.sockets import DealerSocket, new_route
from pdxfer.wire.version import Decoder, encode

BLOCKS, BLOCK = 8192, 16
BEAT_S = 0.5
TOKEN_BYTES = 131072


class SimEngine:
    """Both halves of one engine, and what it would report."""

    def __init__(self, engine_id: str, role: Role, endpoint: str, beside: DealerSocket, rng: random.Random) -> None:
        self.engine_id, self.role, self._rng = engine_id, role, rng
        self.sched = DealerSocket(endpoint, new_route(f"{engine_id}/sched"), None, beside=beside)
        self.worker = DealerSocket(endpoint, new_route(f"{engine_id}/w0"), None, beside=beside)
        self.free_blocks = BLOCKS
        self.hits = self.misses = self.evictions = 0

    def hello(self) -> Hello:
        return Hello(
            engine_id=self.engine_id, incarnation=1, role=self.role, url=f"http://10.0.0.7:81{self.engine_id[1:]:0>2}",
            model="m", served_names=["m"], fingerprint={"model": "m"}, world_size=1, free_blocks=BLOCKS,
            capacity=Capacity(num_blocks=BLOCKS, block_size=BLOCK, max_model_len=1 << 17),
        )  # fmt: skip

    def beat(self, num_running: int, evicts: bool) -> Heartbeat:
        rng = self._rng
        self.hits += rng.randint(5, 30)
        self.misses += rng.randint(2, 9)
        self.evictions += evicts
        dram = TierReport(
            kind="dram", used_bytes=int((0.6 + 0.1 * rng.random()) * (64 << 30)), capacity_bytes=64 << 30,
            num_values=9000, pinned_bytes=2 << 30, hits=self.hits, misses=self.misses, evictions=self.evictions,
        )  # fmt: skip
        disk = TierReport(
            kind="disk", used_bytes=300 << 30, capacity_bytes=1 << 40, num_values=70000, hits=self.hits // 4,
            misses=self.misses,
        )  # fmt: skip
        return Heartbeat(
            incarnation=1, wall=time.time(), free_blocks=self.free_blocks, num_running=num_running, tiers=[dram, disk]
        )


class SimCluster(threading.Thread):
    """`with SimCluster(router, 32, 32) as cluster:` all members joined, `requests_per_s` being served."""

    def __init__(
        self, router: RouterServer, num_prefill: int, num_decode: int, *, requests_per_s: float = 20.0, seed: int = 1,
        with_store: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(name="sim-cluster", daemon=True)
        self._router, self._rng, self._with_store = router, random.Random(seed), with_store
        self._proxy = DealerSocket(router.endpoint, new_route("proxy/sim"), None)
        roles: list[tuple[str, Role]] = [(f"p{n}", "prefill") for n in range(num_prefill)]
        roles += [(f"d{n}", "decode") for n in range(num_decode)]
        self.engines = {name: SimEngine(name, role, router.endpoint, self._proxy, self._rng) for name, role in roles}
        self._period_s = 1 / requests_per_s
        self._decoder: Decoder[FromRouter] = Decoder(FromRouter)  # type: ignore[arg-type]
        self._later: list[tuple[float, int, Pairing, float, int]] = []
        self._stop_asked = threading.Event()
        self.num_served = 0

    def __enter__(self) -> "SimCluster":
        self._join_router()
        self.start()
        wait_until(
            lambda: (s := self._router.snapshot()).is_ready and len(s.engines) == len(self.engines), 30, "all joined"
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_asked.set()
        self.join(10)
        for engine in self.engines.values():
            engine.sched.close()
            engine.worker.close()
        self._proxy.close()

    def run(self) -> None:
        next_beat = next_ask = 0.0
        while not self._stop_asked.is_set():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._beat()
            if now >= next_ask:
                next_ask = max(now, next_ask + self._period_s) if next_ask else now + self._period_s
                self._send(self._proxy, Pair(request_id=f"r-{self._rng.getrandbits(64):016x}", num_tokens=3000,
                                             deadline_s=30.0))  # fmt: skip
            while self._later and self._later[0][0] <= now:
                self._end(*heapq.heappop(self._later)[2:])
            soon = min(next_beat, next_ask, self._later[0][0] if self._later else next_beat)
            self._proxy.wait(max(0.0, min(0.05, soon - time.monotonic())), to_send=False)
            while (payload := self._proxy.receive()) is not None:
                message = self._decoder.decode(payload)
                if isinstance(message, Pairing):
                    self._begin(message)

    def _begin(self, pairing: Pairing) -> None:
        num_tokens = self._rng.choice((600, 2000, 3500, 8000))
        self._send(self.engines[pairing.prefill.engine_id].sched,
                   Started(transfer_id=pairing.transfer_id, num_tokens=num_tokens))  # fmt: skip
        ttft = num_tokens / 9000 + self._rng.expovariate(12)
        item = (time.monotonic() + ttft, self._rng.getrandbits(32), pairing, time.time(), num_tokens)
        heapq.heappush(self._later, item)

    def _end(self, pairing: Pairing, arrival: float, num_tokens: int) -> None:
        """Decode's account, and the proxy's report with stages of a likely shape."""
        rng, key, first_byte = self._rng, pairing.transfer_id, time.time()
        decode, prefill = self.engines[pairing.decode.engine_id], self.engines[pairing.prefill.engine_id]
        parts = [rng.uniform(0.02, 0.2), rng.uniform(0.9, 1.4), rng.uniform(0.01, 0.08), rng.uniform(0.01, 0.05), 0.15]
        walls, at = [], arrival
        for part in parts:
            at += (first_byte - arrival) * part / sum(parts)
            walls.append(at)
        stamps = dict(zip(("started", "prefilled", "landed", "scheduled"), walls, strict=False))
        is_failed = rng.random() < 0.01
        grant = Grant(
            transfer_id=key, epoch=1, decode_id=decode.engine_id, decode_incarnation=1, first_block=0, block_ids=[1],
            num_tokens=num_tokens, token_digest=bytes(32),
        )  # fmt: skip
        ended = Ended(
            transfer_id=key, outcome="failed" if is_failed else "delivered", num_tokens=0 if is_failed else num_tokens,
            num_bytes=0 if is_failed else num_tokens * TOKEN_BYTES, num_units=9, channel="tcp",
            reason="unit 3 of layer 2: the channel broke" if is_failed else "",
        )  # fmt: skip
        self._send(prefill.sched, Stamp(transfer_id=key, stage="prefilled", wall=walls[1]))
        self._send(decode.sched, grant)
        self._send(decode.sched, ended)
        is_local = rng.random() < 0.06
        self._send(
            self._proxy,
            Served(
                request_id=pairing.request_id, endpoint="chat", mode="local" if is_local else "pair", outcome="ok",
                arrival=arrival, first_byte=first_byte, end=first_byte + rng.uniform(0.5, 2), transfer_id=key,
                prefill="" if is_local else prefill.engine_id, decode=decode.engine_id, channel="tcp",
                reason="short prompt" if is_local else ended.reason, stamps={} if is_local else stamps,
                num_bytes=ended.num_bytes, num_tokens=ended.num_tokens,
            ),
        )  # fmt: skip
        self.num_served += 1

    def _join_router(self) -> None:
        decodes = [engine for engine in self.engines.values() if engine.role == "decode"]
        self._send(self._proxy, ProxyHello(proxy_id="sim"))
        for engine in self.engines.values():
            self._send(engine.sched, engine.hello())
            hello = WorkerHello(engine_id=engine.engine_id, incarnation=1, rank=0, addresses=[], generation=0)
            self._send(engine.worker, hello)
            for decode in decodes if engine.role == "prefill" else []:
                self._send(engine.worker, PeerReady(engine_id=decode.engine_id, incarnation=1, kind="tcp"))

    def _beat(self) -> None:
        self._send(self._proxy, Heartbeat(incarnation=1, wall=time.time()))
        for engine in self.engines.values():
            if engine.role == "decode":
                engine.free_blocks = int(BLOCKS * self._rng.uniform(0.3, 0.9))
            beat = engine.beat(self._rng.randint(0, 12), evicts=self._rng.random() < 0.02)
            self._send(engine.sched, Heartbeat(incarnation=1, wall=beat.wall, free_blocks=engine.free_blocks,
                                               num_running=beat.num_running))  # fmt: skip
            worker_beat = Heartbeat(incarnation=1, wall=beat.wall, tiers=beat.tiers if self._with_store else [])
            self._send(engine.worker, worker_beat)
            for socket in (engine.sched, engine.worker):
                while socket.receive() is not None:
                    pass

    def _send(self, socket: DealerSocket, message: Message) -> None:
        payload, deadline = encode(message), time.monotonic() + 20
        while not socket.send(payload):
            assert time.monotonic() < deadline, "the router takes no messages"
            socket.wait(0.1, to_send=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--port", type=int, default=5580)
    parser.add_argument("--no-store", action="store_true")
    options = parser.parse_args()
    from status_rig import serving

    with serving(port=options.port) as site:
        half = options.engines // 2
        with SimCluster(site.router, half, options.engines - half, with_store=not options.no_store):
            print(site.url, flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    main()
