"""Simulated engines and one proxy over real sockets, in one thread, for `pdxfer bench router`.

Engines only send what real ones would; what they receive is taken in sweeps and thrown away. The proxy's socket is
the one that is waited on and timed.
"""

import time
from collections import deque
from collections.abc import Callable

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.wire.keys import ClientSecurity
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
    Stage,
    Stamp,
    Started,
    WorkerHello,
)
from pdxfer.wire.sockets import DealerSocket, new_route
from pdxfer.wire.version import Decoder, encode

_HEARTBEAT_S = 0.5
_SWEEP_S = 0.05
_NUM_TOKENS = 2000
_BLOCK_SIZE = 16
_NUM_BLOCKS = 1 << 20
_JOIN_S = 30.0
_BATCH = 64


class SimulatedEngine:
    """Both halves of one engine."""

    def __init__(
        self, engine_id: str, role: Role, endpoint: str, security: ClientSecurity | None, beside: DealerSocket | None
    ) -> None:
        self.engine_id, self.role = engine_id, role
        self.sched = DealerSocket(endpoint, new_route(f"{engine_id}/sched"), security, beside=beside)
        self.worker = DealerSocket(endpoint, new_route(f"{engine_id}/w0"), security, beside=beside or self.sched)

    def hello(self) -> Hello:
        """As a scheduler half says it."""
        return Hello(
            engine_id=self.engine_id, incarnation=1, role=self.role, url=f"http://{self.engine_id}:8000", model="m",
            served_names=["m"], fingerprint={"model": "m"}, world_size=1, free_blocks=_NUM_BLOCKS,
            capacity=Capacity(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=1 << 20),
        )  # fmt: skip

    def sweep(self) -> None:
        """Throw away what was received."""
        for socket in (self.sched, self.worker):
            while socket.receive() is not None:
                pass


class Load:
    """The simulated cluster around one router.

    `is_whole`: engines send every message of a transfer, not just its end. Heartbeats are spread over their interval,
    as those of members that started at different times are, unless `beat_at_once` was called.
    """

    def __init__(self, endpoint: str, security: ClientSecurity | None, num_engines: int) -> None:
        self.is_whole = False
        self.num_answers = 0
        self.on_answer: Callable[[str, float], object] = lambda request_id, now: None
        self._decoder: Decoder[FromRouter] = Decoder(FromRouter)  # type: ignore[arg-type]
        self._proxy = DealerSocket(endpoint, new_route("proxy/bench"), security)
        self._engines: dict[str, SimulatedEngine] = {}
        shared: DealerSocket | None = None  # the engines share an IO thread; the proxy has its own, as real ones do
        for number in range(num_engines):
            role: Role = "prefill" if number < num_engines // 2 else "decode"
            engine = SimulatedEngine(f"{role[0]}{number}", role, endpoint, security, shared)
            self._engines[engine.engine_id] = engine
            shared = shared or engine.sched
        self._later: deque[tuple[DealerSocket, tuple[Message, ...]]] = deque()
        sockets = [socket for engine in self._engines.values() for socket in (engine.sched, engine.worker)]
        begin, apart = time.monotonic(), _HEARTBEAT_S / (1 + len(sockets))
        self._beats = deque((begin + i * apart, socket) for i, socket in enumerate([self._proxy, *sockets]))
        """When each member's next heartbeat is due, in this order."""
        self._sweep_at = 0.0
        self._num_asked = 0

    def join(self) -> None:
        """Say all hellos and open all channels; returns when the first pairing was answered as such."""
        decodes = [engine for engine in self._engines.values() if engine.role == "decode"]
        self._send(self._proxy, ProxyHello(proxy_id="bench"))
        for engine in self._engines.values():
            self._send(engine.sched, engine.hello())
            self._send(
                engine.worker,
                WorkerHello(engine_id=engine.engine_id, incarnation=1, rank=0, addresses=[], generation=0),
            )
        for engine in self._engines.values():
            for decode in decodes if engine.role == "prefill" else []:
                self._send(engine.worker, PeerReady(engine_id=decode.engine_id, incarnation=1, kind="bench"))

    def ask(self) -> str:
        """Send one Pair; its request id."""
        self._num_asked += 1
        request_id = f"r{self._num_asked}"
        self._send(self._proxy, Pair(request_id=request_id, num_tokens=_NUM_TOKENS, deadline_s=30.0))
        return request_id

    def turn(self, wait_s: float) -> None:
        """Send what is due, wait for the proxy's socket, take what it has."""
        now = time.monotonic()
        self._beat(now)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            for engine in self._engines.values():
                engine.sweep()
        for _ in range(len(self._later)):
            socket, messages = self._later.popleft()
            for message in messages:
                self._send(socket, message)
        self._proxy.wait(0.0 if self._later else wait_s, to_send=False)
        for _ in range(_BATCH):  # bounded: answers send the next question, and heartbeats must go on
            payload = self._proxy.receive()
            if payload is None:
                return
            message = self._decoder.decode(payload)
            if isinstance(message, Pairing):
                self._paired(message)

    def beat_at_once(self) -> None:
        """From now on all heartbeats are due at the same time."""
        due = time.monotonic()
        self._beats = deque((due, socket) for _, socket in self._beats)

    def close(self) -> None:
        """Close all sockets."""
        for engine in reversed(self._engines.values()):
            engine.worker.close()
            engine.sched.close()
        self._proxy.close()

    def _paired(self, pairing: Pairing) -> None:
        self.num_answers += 1
        self.on_answer(pairing.request_id, time.monotonic())
        key, decode = pairing.transfer_id, self._engines[pairing.decode.engine_id]
        ended = Ended(
            transfer_id=key, outcome="delivered", num_tokens=_NUM_TOKENS, num_bytes=1, num_units=1, channel="bench"
        )
        if not self.is_whole:
            self._send(decode.sched, ended)
            return
        prefill = self._engines[pairing.prefill.engine_id]
        self._send(prefill.sched, Started(transfer_id=key, num_tokens=_NUM_TOKENS))
        self._send(prefill.sched, _stamp(key, "started"))
        grant = Grant(
            transfer_id=key, epoch=1, decode_id=decode.engine_id, decode_incarnation=1, first_block=0,
            block_ids=list(range(_NUM_TOKENS // _BLOCK_SIZE)), num_tokens=_NUM_TOKENS, token_digest=bytes(32),
        )  # fmt: skip
        self._later.append((decode.sched, (grant, _stamp(key, "granted"), _stamp(key, "landed"))))
        self._later.append((prefill.sched, (_stamp(key, "prefilled"),)))
        self._later.append((decode.sched, (ended, _stamp(key, "scheduled"))))

    def _beat(self, now: float) -> None:
        while self._beats[0][0] <= now:
            due, socket = self._beats.popleft()
            socket.send(encode(Heartbeat(incarnation=1, wall=SYSTEM_CLOCK.wall(), free_blocks=_NUM_BLOCKS)))
            self._beats.append((max(due + _HEARTBEAT_S, now), socket))

    def _send(self, socket: DealerSocket, message: Message) -> None:
        payload = encode(message)
        deadline = time.monotonic() + _JOIN_S
        while not socket.send(payload):
            assert time.monotonic() < deadline, "the router does not take messages"
            socket.wait(0.1, to_send=True)


def _stamp(transfer_id: str, stage: Stage) -> Stamp:
    return Stamp(transfer_id=transfer_id, stage=stage, wall=SYSTEM_CLOCK.wall())
