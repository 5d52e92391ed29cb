"""Small members for the router's tests: messages with sensible fields, and engines over real sockets."""

import threading
import time
from collections.abc import Callable

from pdxfer.router.client import MemberClient
from pdxfer.wire.keys import ClientSecurity
from pdxfer.wire.messages import (
    Capacity,
    ChannelAddress,
    FromRouter,
    Heartbeat,
    Hello,
    Message,
    Pair,
    PeerReady,
    Peers,
    Role,
    WorkerHello,
)

FINGERPRINT = {"model": "demo", "dtype": "float32", "block_size": "16"}


def make_hello(engine_id: str, role: Role, **changes: object) -> Hello:
    fields: dict[str, object] = {
        "engine_id": engine_id, "incarnation": 1, "role": role, "url": f"http://{engine_id}", "model": "demo",
        "served_names": ["demo"], "fingerprint": FINGERPRINT, "world_size": 1, "free_blocks": 1000,
        "capacity": Capacity(num_blocks=1000, block_size=16, max_model_len=8192),
    }  # fmt: skip
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def make_worker_hello(engine_id: str, rank: int = 0, incarnation: int = 1) -> WorkerHello:
    address = ChannelAddress(kind="tcp", blob=engine_id.encode())
    return WorkerHello(engine_id=engine_id, incarnation=incarnation, rank=rank, addresses=[address], generation=0)


def make_pair(request_id: str, num_tokens: int = 1000, **changes: object) -> Pair:
    fields: dict[str, object] = {"request_id": request_id, "num_tokens": num_tokens, "deadline_s": 10.0}
    return Pair(**{**fields, **changes})  # type: ignore[arg-type]


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        pause.wait(0.005)


class Half:
    """One half of a simulated engine over a real socket; keeps what it received."""

    def __init__(
        self, endpoint: str, identity: str, hello: list[Message], security: ClientSecurity | None, heartbeat_s: float
    ) -> None:
        self.received: list[FromRouter] = []
        self.links: list[bool] = []
        self.free_blocks = 1000
        self.opened: dict[str, PeerReady] = {}
        self._hello = hello
        self._is_scheduler = identity.endswith("/sched")
        self._incarnation: int = hello[0].incarnation  # type: ignore[attr-defined]
        self.client = MemberClient(
            endpoint=endpoint, identity=identity, security=security, hello=self._say_hello, beat=self._beat,
            on_message=self._on_message, on_link=self.links.append, heartbeat_s=heartbeat_s,
        )  # fmt: skip

    def of(self, kind: type) -> list[FromRouter]:
        return [message for message in self.received if isinstance(message, kind)]

    def _say_hello(self) -> list[Message]:
        return [*self._hello, *self.opened.values()]

    def _beat(self) -> Heartbeat:
        free_blocks = self.free_blocks if self._is_scheduler else -1
        return Heartbeat(incarnation=self._incarnation, wall=time.time(), free_blocks=free_blocks)

    def _on_message(self, message: FromRouter) -> None:
        if isinstance(message, Peers):
            for node in message.nodes:
                ready = PeerReady(engine_id=node.engine_id, incarnation=node.incarnation, kind="tcp")
                if self.opened.get(node.engine_id) != ready:
                    self.opened[node.engine_id] = ready
                    self.client.send(ready)
        self.received.append(message)


class SmallEngine:
    """A scheduler half and one worker half whose channels always open."""

    def __init__(
        self, endpoint: str, engine_id: str, role: Role, security: ClientSecurity | None = None,
        heartbeat_s: float = 0.1, **changes: object,
    ) -> None:  # fmt: skip
        hello = make_hello(engine_id, role, **changes)
        worker = make_worker_hello(engine_id, incarnation=hello.incarnation)
        self.engine_id, self.incarnation = engine_id, hello.incarnation
        self.sched = Half(endpoint, f"{engine_id}/sched", [hello], security, heartbeat_s)
        self.worker = Half(endpoint, f"{engine_id}/w0", [worker], security, heartbeat_s)

    def close(self, goodbye: str = "") -> None:
        self.sched.client.close(goodbye)
        self.worker.client.close()
