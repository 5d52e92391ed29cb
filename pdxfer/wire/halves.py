"""The socket between an engine's scheduler half and its worker halves: facts that cannot wait for an engine step.

One ipc socket a run, in a directory only this user can enter. Same-host only: the halves of an engine with several
hosts would need the step path. Both ends have their own IO thread; callbacks run on it, so what they take delays facts:
they put into queues or send a small control to a peer. Only Welcome takes longer, before there is anything to say.
"""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from pdxfer.core.errors import ProtocolError
from pdxfer.wire.messages import BlockIds, ChannelAddress, Id, Text
from pdxfer.wire.store_facts import Fact, ToSchedulerStore, ToWorkerStore
from pdxfer.wire.version import Decoder, encode

log = logging.getLogger(__name__)

_CLOSE_S = 2.0


# ---- scheduler half → worker halves ------------------------------------------------------------------------------


class Welcome(Fact, tag="welcome", frozen=True):
    """First message to a worker: the incarnation this engine lives under."""

    incarnation: int


class Expect(Fact, tag="expect", frozen=True):
    """decode: these blocks may be filled; sent before the Grant leaves."""

    transfer_id: Id
    epoch: int
    prefill_id: Id
    first_block: int
    block_ids: BlockIds


class Revoke(Fact, tag="revoke", frozen=True):
    """decode: take the grant back; answer Fenced when no byte of it can land any more."""

    transfer_id: Id
    epoch: int
    reason: Text


class Forget(Fact, tag="forget", frozen=True):
    """prefill: send nothing more of this transfer; answer Settled when no byte of it can leave any more."""

    transfer_id: Id
    reason: Text


# ---- worker half → scheduler half --------------------------------------------------------------------------------


class WorkerReady(Fact, tag="worker_ready", frozen=True):
    """A rank has its KV region and endpoints; `fingerprint` is what a partner must share."""

    rank: int
    fingerprint: dict[str, str]
    identity: dict[str, str] = {}
    """What stored chunks of this rank depend on (kv/chunks.identity_digest)."""


class Listening(Fact, tag="listening", frozen=True):
    """Where the rank's endpoints listen (logged, and shown by doctor)."""

    rank: int
    addresses: list[ChannelAddress]


class Landed(Fact, tag="landed", frozen=True):
    """decode: every unit of the grant is in place and verified on this rank."""

    rank: int
    transfer_id: Id
    epoch: int
    num_units: int
    num_bytes: int
    channel: Id
    wall: float


class Fenced(Fact, tag="fenced", frozen=True):
    """decode: the grant is over on this rank and nothing of it can land; the first `num_valid` blocks are good."""

    rank: int
    transfer_id: Id
    epoch: int
    num_valid: int
    reason: Text
    num_units: int = 0
    """Landed before, and their bytes."""
    num_bytes: int = 0


class Generation(Fact, tag="generation", frozen=True):
    """decode: so many grants have been taken back on this rank; the next Grant names it."""

    rank: int
    number: int


class Computed(Fact, tag="computed", frozen=True):
    """prefill: the step that completes this prompt has been computed; sent where the CPU knows (not on CUDA)."""

    transfer_id: Id
    wall: float


class Settled(Fact, tag="settled", frozen=True):
    """prefill: no byte of this transfer is read any more on this rank; its blocks may go back."""

    rank: int
    transfer_id: Id
    delivered: bool
    reason: Text


ToWorker = Welcome | Expect | Revoke | Forget | ToWorkerStore
ToScheduler = WorkerReady | Listening | Landed | Fenced | Generation | Computed | Settled | ToSchedulerStore


class _Link:
    """A socket with an IO thread: outgoing messages from a queue, incoming ones to a callback. Nothing goes out or
    comes in before `start`, so that its owner is whole when the first callback runs."""

    def __init__(self, name: str) -> None:
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._context = zmq.Context(io_threads=1)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_out = self._context.socket(zmq.PAIR)
        address = f"inproc://{name}-{id(self)}"
        self._wake_out.bind(address)
        self._wake_in.connect(address)
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stop = False

    def start(self) -> None:
        """Once, when callbacks may come."""
        self._thread.start()

    def _post(self, frames: list[bytes]) -> None:
        self._outbox.put(frames)
        self._ring()

    def _ring(self) -> None:
        with self._wake_lock:
            if not self._wake_in.closed:
                try:
                    self._wake_in.send(b"", zmq.NOBLOCK)
                except zmq.Again:
                    return  # the thread is awake anyway

    def close(self) -> None:
        """Stop the IO thread, which closes the sockets: they are its own; idempotent."""
        if self._stop:
            return
        self._stop = True
        self._ring()
        if not self._thread.is_alive():  # it never was, or it has ended
            self._destroy()
            return
        self._thread.join(timeout=_CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s does not end yet: a callback takes longer than %g s", self._thread.name, _CLOSE_S)

    def _destroy(self) -> None:
        with self._wake_lock:
            self._context.destroy(linger=0)

    def _run(self) -> None:
        try:
            with self._open() as socket:
                self._serve(socket)
        finally:
            self._destroy()

    def _serve(self, socket: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(1000))
            if self._wake_out in ready:
                while self._wake_out.poll(0):
                    self._wake_out.recv()
            while not self._outbox.empty():
                self._transmit(socket, self._outbox.get())
            while socket.poll(0):
                try:
                    self._receive(socket, socket.recv_multipart())
                except ProtocolError as error:
                    log.warning("dropped a message between halves: %s", error)
                except Exception:
                    # Facts must go on flowing: without them no transfer of this engine would ever end.
                    log.exception("a message between halves failed")

    def _open(self) -> "zmq.Socket[bytes]":
        """Bound or connected, of `_socket`."""
        raise AssertionError("subclass")

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        """Sending never waits: two ends that waited for each other to read would wait for ever. What is on its way is
        bounded by what the engine has under way, as is the outbox."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        return socket

    def _transmit(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        socket.send_multipart(frames)

    def _receive(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        raise AssertionError("subclass")


class SchedulerEnd(_Link):
    """The scheduler half's end: one peer a rank. Messages sent before a rank connects are kept for it."""

    def __init__(self, path: str, world_size: int, on_fact: Callable[[ToScheduler], None]) -> None:
        super().__init__("pdxfer-halves-s")
        self._path, self._on_fact = path, on_fact
        self._decoder: Decoder[ToScheduler] = Decoder(ToScheduler)  # type: ignore[arg-type]
        self._ranks = [b"w%d" % rank for rank in range(world_size)]
        self._early: dict[bytes, list[bytes]] = {rank: [] for rank in self._ranks}

    def broadcast(self, message: ToWorker) -> None:
        """Send to every rank; ordered per rank."""
        data = encode(message)
        for rank in self._ranks:
            self._post([rank, data])

    def send(self, rank: int, message: ToWorker) -> None:
        """Send to one rank, in the same order as what is broadcast."""
        self._post([self._ranks[rank], encode(message)])

    def _destroy(self) -> None:
        super()._destroy()
        Path(self._path.removeprefix("ipc://")).unlink(missing_ok=True)

    def _open(self) -> "zmq.Socket[bytes]":
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(self._path)
        return socket

    def _transmit(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        rank, data = frames
        if rank in self._early:
            self._early[rank].append(data)
            return
        try:
            socket.send_multipart(frames)
        except zmq.ZMQError as error:
            log.warning("worker %s is gone: %s", rank.decode(), error)

    def _receive(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        if len(frames) != 2 or frames[0] not in self._ranks:
            raise ProtocolError(f"unexpected frames from {frames[:1]!r}")
        for data in self._early.pop(frames[0], []):
            socket.send_multipart([frames[0], data])
        if frames[1]:
            self._on_fact(self._decoder.decode(frames[1]))


class WorkerEnd(_Link):
    """A rank's end. May be made before the scheduler half exists; ZMQ connects when it appears."""

    def __init__(self, path: str, rank: int, on_message: Callable[[ToWorker], None]) -> None:
        super().__init__(f"pdxfer-halves-w{rank}")
        self._path, self._rank, self._on_message = path, rank, on_message
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)  # type: ignore[arg-type]
        self._post([b""])

    def send(self, fact: ToScheduler) -> None:
        """Send one fact; never blocks."""
        self._post([encode(fact)])

    def _open(self) -> "zmq.Socket[bytes]":
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"w%d" % self._rank)
        socket.connect(self._path)
        return socket

    def _receive(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        self._on_message(self._decoder.decode(frames[-1]))
