"""The arms of the transfer bench: each moves the KV of a prompt, or of several in a row, and returns when the receiver
has all of it."""

import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from pdxfer.bench.transfer_rig import (
    MOMENT,
    OPTIONS,
    RECEIVER,
    SECRET,
    SENDER,
    WAIT_S,
    BenchSink,
    Shape,
    Target,
    moment,
    send_all,
)
from pdxfer.core.errors import PdxferError
from pdxfer.kv.runs import block_runs, pair_runs, total_bytes
from pdxfer.transport.base import Channel, Endpoint, OutgoingUnit, UnitHeader
from pdxfer.transport.kinds import endpoint_factories

MAX_IN_FLIGHT = 16
"""As a lane has (node/lane.py)."""
BIG = "nixl raw, one descriptor"


class Arms:
    """Everything that can be measured on one shape. `names` is the order of a round."""

    def __init__(self, shape: Shape, kinds: Sequence[str], target: Target) -> None:
        self.shape, self._target = shape, target
        self._memory, self._region = shape.memory()
        self._memory[:] = np.random.default_rng(1).integers(0, 256, self._memory.size, dtype=np.uint8)
        self._ids, self._their_ids = shape.blocks(seed=1), shape.blocks(seed=2)
        self._closers: list[Callable[[], None]] = []
        self._arms: dict[str, Callable[[], float]] = {"memcpy": self._memcpy(), "socket": self._socket()}
        addresses = target.ask("addresses")
        for kind in kinds:
            if kind in addresses:
                self._add_channel(kind, addresses[kind])
        if "nixl" in self._arms:
            self._add_raw()

    @property
    def names(self) -> list[str]:
        return list(self._arms)

    def time(self, name: str) -> float:
        """Seconds of one measurement, until the receiver has all of it."""
        begin = moment()
        return self._arms[name]() - begin

    def check(self, name: str) -> None:
        """Run once and compare every byte on the other side."""
        if name == "memcpy":
            self._arms[name]()
            return
        self._target.ask("clear")
        self._arms[name]()
        runs = block_runs(self._region.layout, self._ids, 0, self.shape.num_layers)
        if name == BIG:
            runs = np.array([[0, self.shape.total_bytes]])
        there = self._target.ask("digest", "big" if name == BIG else "blocks")
        assert there == self._region.digest(runs), f"{name} moved other bytes"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for close in reversed(self._closers):
            close()

    # ---- references --------------------------------------------------------------------------------------------------

    def _memcpy(self) -> Callable[[], float]:
        memory, region = self.shape.memory()
        layers = (0, self.shape.num_layers)
        pairs = pair_runs(
            block_runs(self._region.layout, self._ids, *layers), block_runs(region.layout, self._their_ids, *layers)
        )
        views = list(zip(region.views(pairs[1]), self._region.views(pairs[0]), strict=True))

        def copy() -> float:
            assert memory.size
            for _ in range(self.shape.num_prompts):
                for there, here in views:
                    there[:] = here
            return moment()

        return copy

    def _socket(self) -> Callable[[], float]:
        sock = socket.create_connection(("127.0.0.1", self._target.ask("socket")), WAIT_S)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closers.append(sock.close)
        chunks = [
            self._region.views(block_runs(self._region.layout, self._chunk(index), 0, self.shape.num_layers))
            for index in self.shape.units()
        ]

        def send() -> float:
            for views in chunks:
                send_all(sock, views)
            return float(MOMENT.unpack(sock.recv(MOMENT.size, socket.MSG_WAITALL))[0])

        return send

    def _add_raw(self) -> None:
        from pdxfer.bench.transfer_raw import RawSender
        from pdxfer.transport.nixl_agent import indices

        sender = RawSender(self._region.layout)
        self._closers.append(sender.close)
        metadata, layout = self._target.ask("raw", sender.metadata)
        sender.add(metadata)
        everything = (0, self.shape.num_layers)
        parts = [
            (
                indices(self._region.layout, self._chunk(index), *everything),
                indices(layout, self.shape.chunk(self._their_ids, index), *everything),
            )
            for index in self.shape.units()
        ]
        zero = np.zeros(1, dtype=np.int32)
        paged, big = sender.paged(layout), sender.big(layout, self.shape.total_bytes)

        def move_paged() -> float:
            self._target.say("raw serve", len(parts))
            sender.move(paged, parts)
            return self._target.landed()

        def move_big() -> float:
            self._target.say("raw serve", self.shape.num_prompts)
            sender.move(big, [(zero, zero)] * self.shape.num_prompts)
            return self._target.landed()

        self._arms |= {"nixl raw, same descriptors": move_paged, BIG: move_big}

    # ---- channels ----------------------------------------------------------------------------------------------------

    def _chunk(self, index: int) -> list[int]:
        return self.shape.chunk(self._ids, index)

    def _add_channel(self, kind: str, address: bytes) -> None:
        sink = BenchSink(self._region, self._ids, self.shape.moved_bytes)
        try:
            endpoint: Endpoint = endpoint_factories([kind])[kind](OPTIONS, SENDER, self._region, sink)
            self._closers.append(endpoint.close)
            endpoint.admit([RECEIVER], SECRET)
            channel = endpoint.connect(RECEIVER, address, 20.0)
            channel.probe(20.0)
        except PdxferError as error:
            raise SystemExit(f"channel {kind} does not work here: {error}") from error
        self._arms[kind] = lambda: self._move(channel, digest=False)
        self._arms[f"{kind} + digest, verify"] = lambda: self._move(channel, digest=True)

    def _move(self, channel: Channel, digest: bool) -> float:
        """What a lane does: units one by one, up to so many in flight."""
        in_flight = 0
        for index in self.shape.units():
            while in_flight >= MAX_IN_FLIGHT:
                in_flight -= self._reported(channel)
            channel.write(self._unit(index, digest))
            in_flight += 1
        while in_flight:
            in_flight -= self._reported(channel)
        return float(self._target.ask("landed", channel.kind))

    def _reported(self, channel: Channel) -> int:
        results = channel.poll(0.1)
        assert not any(result.error for result in results), results
        return len(results)

    def _unit(self, index: int, digest: bool) -> OutgoingUnit:
        ids = self._chunk(index)
        source = block_runs(self._region.layout, ids, 0, self.shape.num_layers)
        header = UnitHeader(
            transfer_id="t",
            epoch=0,
            first_block=index * self.shape.chunk_blocks,
            num_blocks=len(ids),
            first_layer=0,
            num_layers=self.shape.num_layers,
            num_bytes=total_bytes(source),
            digest=self._region.digest(source) if digest else 0,
        )
        targets = self.shape.chunk(self._their_ids, index)
        return OutgoingUnit(header=header, source=source, source_blocks=ids, target_blocks=targets)
