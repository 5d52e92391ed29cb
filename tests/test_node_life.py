"""How a node begins and ends, and the link between the halves: nothing is left open, nothing stands still."""

import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from router_kit import wait_until

from pdxfer.core.errors import ConfigError
from pdxfer.kv.layout import KvLayout
from pdxfer.memory.region import Region
from pdxfer.node.node import Node
from pdxfer.node.settings import NodeSettings
from pdxfer.transport.base import Endpoint, EndpointFactory, PeerId
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.wire.halves import Forget, Generation, SchedulerEnd, ToScheduler, Welcome, WorkerEnd
from pdxfer.wire.run_sockets import socket_path

_MEMORY = np.zeros(64, dtype=np.uint8)


def region() -> Region:
    """One layer of one block."""
    return Region(
        KvLayout(
            base=_MEMORY.ctypes.data,
            num_bytes=_MEMORY.nbytes,
            num_blocks=1,
            block_bytes=64,
            block_stride=64,
            layer_offsets=(0,),
            block_size=16,
        )
    )


def scheduler_end(name: str) -> SchedulerEnd:
    """A scheduler half that hears nothing."""
    end = SchedulerEnd(socket_path(name), 1, lambda fact: None)
    end.start()
    return end


def node_with(factory: EndpointFactory, name: str) -> Node:
    """A node with one kind of channel, and a router that is not there."""
    settings = NodeSettings(engine_id="p0", rank=0, halves_path=socket_path(name), router="tcp://127.0.0.1:1")
    return Node(settings, region(), {}, {"mine": factory})


def test_device_memory_without_a_channel_for_it_ends_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is started, no socket opened. Without a router nobody would send, so a store node starts."""
    monkeypatch.setattr("pdxfer.node.node.is_nixl_installed", lambda: False)
    device = Region(msgspec.structs.replace(region().layout, memory="VRAM"))
    settings = NodeSettings(engine_id="p0", rank=0, halves_path="ipc:///nowhere", router="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="KV is in GPU memory.*nixl: NIXL is not installed; tcp: reaches host"):
        Node(settings, device, {}, endpoint_factories(["nixl", "tcp"]))


def test_a_node_whose_channels_all_fail_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """For whatever reason: no traceback, and the scheduler half can still be served."""

    def broken(*_: object) -> Endpoint:
        raise ConfigError("the NIC is on fire")

    with closing(scheduler_end("broken-channels")) as scheduler, closing(node_with(broken, "broken-channels")):
        scheduler.broadcast(Welcome(incarnation=1))
        wait_until(lambda: "cannot join" in caplog.text)
    assert "rank 0 cannot join the router at tcp://127.0.0.1:1: none of the channel kinds ['mine']" in caplog.text
    assert "the NIC is on fire" in caplog.text and not any(record.exc_info for record in caplog.records)


def test_nothing_is_heard_from_the_scheduler_half_before_the_node_is_whole() -> None:
    """A link that spoke while the node was being made lost its Welcome, and the engine never joined."""
    heard: list[object] = []
    path = socket_path("early-halves")
    scheduler = SchedulerEnd(path, 1, lambda fact: None)
    scheduler.start()
    scheduler.broadcast(Welcome(incarnation=1))
    worker = WorkerEnd(path, 0, heard.append)
    wait_until(lambda: not scheduler._outbox.qsize())
    assert not worker._thread.is_alive() and not heard
    worker.start()
    wait_until(lambda: heard)
    worker.close()
    scheduler.close()


class IdleEndpoint:
    """Open until it is closed."""

    kind, writes_here, generation = "mine", True, 1

    def __init__(self) -> None:
        self.is_closed = False

    def address(self) -> bytes:
        return b"here"

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None: ...

    def attend(self, active: bool) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def test_a_node_closed_while_its_endpoints_are_opened_closes_them() -> None:
    """They listen, and whoever connects could write: closing them is the fence."""
    endpoint, nodes = IdleEndpoint(), list[Node]()
    is_opening, is_closing = threading.Event(), threading.Event()
    closer = threading.Thread(target=lambda: nodes[0].close())

    def slow(*_: object) -> Endpoint:
        is_opening.set()
        assert is_closing.wait(10.0)
        closer.join(0.2)  # the end comes, and may get as far as it can without us
        return endpoint  # type: ignore[return-value]

    with closing(scheduler_end("close-midway")) as scheduler:
        nodes.append(node_with(slow, "close-midway"))
        scheduler.broadcast(Welcome(incarnation=1))
        assert is_opening.wait(10.0)
        closer.start()
        is_closing.set()
        closer.join(10.0)
        assert not closer.is_alive() and endpoint.is_closed


def test_no_socket_of_an_engine_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own goes with it, that of a killed engine when the next one starts; one that is served stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = socket_path("closed")
    scheduler = SchedulerEnd(path, 1, lambda _: None)
    scheduler.start()
    file = Path(path.removeprefix("ipc://"))
    wait_until(file.exists)
    with closing(socket.socket(socket.AF_UNIX)) as killed:
        killed.bind(str(file.parent / "killed"))
    for old in file.parent.iterdir():
        os.utime(old, (1, 1))
    socket_path("next")
    assert [left.name for left in file.parent.iterdir()] == ["closed"]
    scheduler.close()
    assert not file.exists()
    file.parent.rmdir()
    file.parent.touch()
    with pytest.raises(ConfigError, match="is a file"):
        socket_path("none")


def test_halves_that_both_have_much_to_say_do_not_wait_for_each_other() -> None:
    """Each end sends and receives on one thread: one that waited for room to send would not read, and so for ever."""
    num_facts = 3000
    told: list[object] = []
    heard: list[ToScheduler] = []
    path = socket_path("much-to-say")
    scheduler, worker = SchedulerEnd(path, 1, heard.append), WorkerEnd(path, 0, told.append)
    with closing(scheduler), closing(worker):
        for number in range(num_facts):
            scheduler.broadcast(Forget(transfer_id=f"t{number}", reason="x" * 1000))
            worker.send(Generation(rank=0, number=number))
        scheduler.start()
        worker.start()
        wait_until(lambda: len(heard) == len(told) == num_facts)
    assert [fact.number for fact in heard if isinstance(fact, Generation)] == list(range(num_facts))


def test_a_link_closed_in_the_middle_of_a_callback_closes_its_sockets_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ZMQ's sockets belong to one thread: closed by another one in the middle of a call the process may die."""
    monkeypatch.setattr("pdxfer.wire.halves._CLOSE_S", 0.01)
    is_called, may_go_on = threading.Event(), threading.Event()

    def slow(message: object) -> None:
        is_called.set()
        assert may_go_on.wait(10.0)

    path = socket_path("slow-callback")
    with closing(scheduler_end("slow-callback")) as scheduler:
        worker = WorkerEnd(path, 0, slow)
        worker.start()
        scheduler.broadcast(Welcome(incarnation=1))
        assert is_called.wait(10.0)
        worker.close()
        assert "does not end yet" in caplog.text and not worker._context.closed
        may_go_on.set()
        worker._thread.join(10.0)
        assert worker._context.closed
        worker.send(Generation(rank=0, number=1))
        worker.close()
