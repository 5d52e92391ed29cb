"""Memory for a GPU's copies: registered with CUDA on the device in use, unregistered before it is unmapped. On a fake
torch that writes down calls: no GPU was at hand."""

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdxfer.config.store import TierConfig
from pdxfer.memory.pinning import pin
from pdxfer.memory.segment import Segment
from pdxfer.store.dram import DramTier
from pdxfer.store.server import StoreServer, shared_segment
from pdxfer.store.shared import SharedDramTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, until


class FakeCuda:
    """Of three devices; the process has memory on `used`. Reads a byte of what it is told, as a driver might."""

    def __init__(self, used: int | None = 1, code: int = 0) -> None:
        self.used, self.code = used, code
        self.calls: list[tuple[str, int, int]] = []
        """(verb, address, device)."""
        self.num_bytes = 0
        self._device = 0

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 3

    def memory_allocated(self, device: int) -> int:
        return MIB if device == self.used else 0

    def cudart(self) -> "FakeCuda":
        return self

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self._device = self._device, number
        yield
        self._device = before

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1 and len(ctypes.string_at(address + num_bytes - 1, 1)) == 1
        self.num_bytes = num_bytes
        self.calls.append(("register", address, self._device))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert len(ctypes.string_at(address, 1)) == 1, "still mapped"
        self.calls.append(("unregister", address, self._device))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


def test_it_is_registered_on_the_device_in_use_and_unregistered_once(cuda: FakeCuda) -> None:
    segment = Segment.private(2 * MIB)
    assert pin(segment)
    assert cuda.calls == [("register", segment.address, 1)] and cuda.num_bytes == segment.num_bytes
    segment.close()
    segment.close()
    assert cuda.calls[1:] == [("unregister", segment.address, 1)]


def test_a_refusal_is_one_warning_and_nothing_to_undo(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.code = 2
    segment = Segment.private(2 * MIB)
    assert not pin(segment)
    segment.view[:4] = b"kept"
    segment.close()
    assert [verb for verb, *_ in cuda.calls] == ["register"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "cannot pin 2 MiB for the GPU: CUDA error 2; its copies are slower (see `ulimit -l`)"
    ]


def test_a_process_that_uses_no_gpu_is_left_alone(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.used = None
    segment = Segment.private(MIB)
    assert not pin(segment)
    monkeypatch.delitem(sys.modules, "torch")
    assert not pin(segment)
    segment.close()
    assert not cuda.calls


async def test_the_dram_tier_pins_its_arena_after_populating_it(cuda: FakeCuda) -> None:
    tier = DramTier(TierConfig(url="dram:", capacity_gib=2 * MIB / (1 << 30)), FakeClock())
    await tier.open()
    segment = tier.arena.segment
    await until(lambda: cuda.calls == [("register", segment.address, 1)], "the arena to be pinned")
    await tier.close()
    assert cuda.calls[1:] == [("unregister", segment.address, 1)]


async def test_an_engine_pins_the_shared_memory_that_it_attaches(cuda: FakeCuda, tmp_path: Path) -> None:
    """Each time anew: it is another mapping."""
    config = TierConfig(url="dram:", capacity_gib=2 * MIB / (1 << 30), options={"populate": "false"})
    hosted = DramTier(config, FakeClock(), make_segment=shared_segment)
    await hosted.open()
    server = StoreServer(hosted, FakeClock(), tmp_path / "store.sock")
    await server.start()
    try:
        for _ in range(2):
            cuda.calls.clear()
            tier = SharedDramTier(TierConfig(url=f"shm:{tmp_path}/store.sock"), FakeClock())
            await tier.open()
            assert tier.segment_address is not None
            address, _num_bytes = tier.segment_address
            await until(lambda: bool(cuda.calls), "the segment to be pinned")
            await tier.close()
            assert cuda.calls == [("register", address, 1), ("unregister", address, 1)]
    finally:
        await server.close()
