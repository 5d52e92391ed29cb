"""The two sides of the transfer bench: shapes, memory, and the receiving process that the arms write to.

The receiver answers on a pipe what the senders need to know, and when all bytes of a measurement were in its memory;
its channels have threads of their own.
"""

import multiprocessing
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pdxfer.core.errors import ChannelError, PdxferError
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import Runs, block_runs
from pdxfer.memory.region import Region
from pdxfer.transport.base import Control, Endpoint, EndpointOptions, PeerId, UnitHeader
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.transport.vectors import IOV_MAX

SECRET = b"bench"
SENDER = PeerId(engine_id="sender", incarnation=1, rank=0)
RECEIVER = PeerId(engine_id="receiver", incarnation=1, rank=0)
OPTIONS = EndpointOptions(max_fence_groups=1)
WAIT_S = 60.0
MOMENT = struct.Struct("d")
moment = time.monotonic
"""One clock for all processes of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Geometry of one prompt's KV, and how many prompts follow each other."""

    base: str
    num_layers: int
    block_bytes: int
    chunk_blocks: int
    """Blocks of 256 tokens."""
    num_chunks: int
    """Of one prompt."""
    num_prompts: int = 1
    """Of one measurement, one behind the other; all lie in the same blocks."""

    @property
    def name(self) -> str:
        """In the summary's keys."""
        return f"{self.base}_x{self.num_prompts}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.num_prompts} x {self.num_layers} layers of {self.block_bytes >> 10} KiB blocks"

    @property
    def num_blocks(self) -> int:
        """Blocks of one prompt."""
        return self.chunk_blocks * self.num_chunks

    @property
    def total_bytes(self) -> int:
        """Of one prompt."""
        return self.num_blocks * self.num_layers * self.block_bytes

    @property
    def moved_bytes(self) -> int:
        """Of one measurement."""
        return self.total_bytes * self.num_prompts

    def units(self) -> list[int]:
        """Chunks of one measurement, in order."""
        return [*range(self.num_chunks)] * self.num_prompts

    def memory(self) -> tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", Region]:
        """A pool half as large again as what moves, blocks of a layer adjacent; touched, so that no page is missing."""
        pool = self.num_blocks * 3 // 2
        memory = np.ones(self.num_layers * pool * self.block_bytes, dtype=np.uint8)
        layout = KvLayout(
            base=memory.ctypes.data,
            num_bytes=memory.size,
            num_blocks=pool,
            block_bytes=self.block_bytes,
            block_stride=self.block_bytes,
            layer_offsets=tuple(i * pool * self.block_bytes for i in range(self.num_layers)),
            block_size=256 // self.chunk_blocks,
        )
        return memory, Region(layout)

    def blocks(self, seed: int) -> list[int]:
        """Random block ids in prompt order, no two of a chunk neighbours by design."""
        ids: list[int] = np.random.default_rng(seed).permutation(self.num_blocks * 3 // 2)[: self.num_blocks].tolist()
        return ids

    def chunk(self, ids: list[int], index: int) -> list[int]:
        """Block ids of one chunk."""
        return ids[index * self.chunk_blocks : (index + 1) * self.chunk_blocks]


SHAPES = {
    "96k": Shape(base="96k", num_layers=30, block_bytes=98304, chunk_blocks=2, num_chunks=14),
    "16k": Shape(base="16k", num_layers=32, block_bytes=16384, chunk_blocks=16, num_chunks=8),
}


class BenchSink:
    """Takes everything; remembers when all bytes of a measurement were in."""

    generation = 0

    def __init__(self, region: Region, blocks: list[int], num_bytes: int) -> None:
        """`num_bytes`: of one measurement."""
        self._region, self._blocks = region, blocks
        self._num_bytes, self._num_arrived = num_bytes, 0
        self._moments: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.num_corrupt = 0

    def landed(self) -> float:
        """The moment at which the last measurement was whole (`moment`)."""
        at = self._moments.get(timeout=WAIT_S)
        assert not self.num_corrupt, f"{self.num_corrupt} units went wrong"
        return at

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        ids = self._blocks[header.first_block : header.first_block + header.num_blocks]
        return block_runs(self._region.layout, ids, header.first_layer, header.num_layers)

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        runs = self.claim(peer, header)
        assert runs is not None
        good = not header.digest or self._region.digest(runs) == header.digest
        self.num_corrupt += not good
        self._num_arrived += header.num_bytes
        if self._num_arrived == self._num_bytes:
            self._num_arrived = 0
            self._moments.put(moment())
        return good

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        self.num_corrupt += 1

    def control(self, peer: PeerId, control: Control) -> None: ...

    def lost(self, peer: PeerId, reason: str) -> None: ...


class Target:
    """The receiving process, seen from the sender's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, *question: Any) -> Any:
        """Send a command and wait for its answer."""
        self._connection.send(question)
        return self._recv(question[0])

    def landed(self) -> float:
        """The moment at which everything was in the receiver's memory, after a command that tells it."""
        return float(self._recv("landed"))

    def say(self, *command: Any) -> None:
        """Send a command whose answer is fetched later, or that has none."""
        self._connection.send(command)

    def _recv(self, what: str) -> Any:
        if not self._connection.poll(WAIT_S):
            raise ChannelError(f"the receiving process does not answer {what}")
        return self._connection.recv()


@contextmanager
def open_target(shape: Shape, kinds: Sequence[str]) -> Iterator[Target]:
    """Start the receiving process; stop it at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, shape, tuple(kinds)), daemon=True)
    process.start()
    try:
        yield Target(ours)
    finally:
        ours.send(("stop",))
        process.join(10)
        process.kill()


def _receive(connection: Connection, shape: Shape, kinds: tuple[str, ...]) -> None:
    """The receiving process."""
    memory, region = shape.memory()
    blocks = shape.blocks(seed=2)
    endpoints: dict[str, Endpoint] = {}
    sinks: dict[str, BenchSink] = {}
    for kind, factory in endpoint_factories(kinds).items():
        sinks[kind] = BenchSink(region, blocks, shape.moved_bytes)
        try:
            endpoints[kind] = factory(OPTIONS, RECEIVER, region, sinks[kind])
        except PdxferError:
            continue
        endpoints[kind].admit([SENDER], SECRET)
        endpoints[kind].attend(True)
    raw = None
    while (command := connection.recv())[0] != "stop":
        match command:
            case ("addresses",):
                connection.send({kind: endpoint.address() for kind, endpoint in endpoints.items()})
            case ("clear",):
                memory[:] = 0
                connection.send(None)
            case ("digest", source):
                runs = block_runs(region.layout, blocks, 0, shape.num_layers)
                if source == "big":
                    runs = np.array([[0, shape.total_bytes]])
                connection.send(region.digest(runs))
            case ("socket",):
                _serve_socket(connection, shape, region, blocks)
            case ("raw", metadata):
                from pdxfer.bench.transfer_raw import RawTarget

                raw = RawTarget(region.layout)
                connection.send((raw.metadata, region.layout))
                raw.add(metadata)
            case ("raw serve", count):
                assert raw is not None
                raw.serve(count)
                connection.send(moment())
            case ("landed", kind):
                connection.send(sinks[kind].landed())
    if raw is not None:
        raw.close()
    for endpoint in endpoints.values():
        endpoint.close()


def _serve_socket(connection: Connection, shape: Shape, region: Region, blocks: list[int]) -> None:
    """A thread that receives prompts into place, with nothing around: the plain-socket reference."""
    server = socket.create_server(("127.0.0.1", 0))
    connection.send(server.getsockname()[1])
    chunks = [
        region.views(block_runs(region.layout, shape.chunk(blocks, index), 0, shape.num_layers))
        for index in shape.units()
    ]

    def serve() -> None:
        sock, _ = server.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for views in chunks:
                if not receive_all(sock, views):
                    return
            sock.sendall(MOMENT.pack(moment()))

    threading.Thread(target=serve, daemon=True).start()


def receive_all(sock: socket.socket, views: list[memoryview]) -> bool:
    """Fill the views; False at the end of the stream."""
    while views:
        count = sock.recvmsg_into(views[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
        if count == 0:
            return False
        views = _skip(views, count)
    return True


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """Send the views."""
    while views:
        views = _skip(views, sock.sendmsg(views[:IOV_MAX]))


def _skip(views: list[memoryview], count: int) -> list[memoryview]:
    index = 0
    while index < len(views) and count >= len(views[index]):
        count -= len(views[index])
        index += 1
    return [views[index][count:], *views[index + 1 :]] if count else views[index:]


def relax() -> None:
    """Let the other process have the core; spinning against it would cost a time slice a message."""
    os.sched_yield()
