"""NIXL storage tiers: POSIX and OBJ by the real plug-ins; GDS, GDS_MT and errors by a fake.

The fake checks the calls and their order.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_campaign import run_campaign
from servers.cloud import S3Server

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.disk_index import Record
from pdxfer.store.remote.nixl_header import HEADER_BYTES, name_of, pack_header, unpack_header
from pdxfer.store.remote.nixl_mover import Descriptor, InPlace, Mover, Plugin
from pdxfer.store.remote.nixl_options import read_nixl_options
from pdxfer.store.remote.nixl_storage import NixlStorageTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, Wanted, closing, key_of, value_of
from pdxfer.testing.tier_suite import TierSuite

SMALL = Wanted(capacity_bytes=8 * MIB)


@pytest.mark.slow
class TestNixlPosixTier(TierSuite):
    """All promises of tiers, through the real plug-in."""

    survives_restart = True
    capacity_bytes = 24 * MIB

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return NixlStorageTier(wanted.config(f"nixl-posix://{where}/kv"), clock, **wanted.limits())


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.mark.slow
class TestNixlObjTier(TierSuite):
    """All promises of tiers, through the real plug-in, on SeaweedFS."""

    survives_restart = True
    capacity_bytes = 12 * MIB

    @pytest.fixture(autouse=True)
    def _on(self, s3: S3Server) -> None:
        self.s3 = s3

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        url = self.s3.url(path=f"/{where.name}").replace("s3:", "nixl-obj:")
        return NixlStorageTier(wanted.config(url, index=f"{where}/index"), clock, **wanted.limits())


@pytest.mark.slow
async def test_a_frozen_object_store_costs_nobody_more_than_the_deadline(tmp_path: Path, s3: S3Server) -> None:
    """Nor does it hold up the event loop; values are there again as soon as it goes on."""
    url, value = s3.url(path="/frozen").replace("s3:", "nixl-obj:"), value_of("k", MIB)
    tier = NixlStorageTier(SMALL.config(url, index=f"{tmp_path}/index"), SYSTEM_CLOCK)
    async with closing(tier):
        await tier.open()
        assert await tier.put(key_of("k"), [value], SYSTEM_CLOCK.now() + 20) is Outcome.STORED
        s3.freeze()
        try:
            for _ in range(3):
                began = SYSTEM_CLOCK.now()
                assert await tier.get(key_of("k"), began + 0.3) is None
                assert SYSTEM_CLOCK.now() - began < 10
        finally:
            s3.thaw()
        lease = await tier.get(key_of("k"), SYSTEM_CLOCK.now() + 20)
        assert lease is not None
        async with lease:
            assert lease.view == value
        assert tier.stats().failures == {"late": 3}


# ---- a fake of the plug-ins --------------------------------------------------------------------------------------


class FakeAgent:
    """Refuses whatever NIXL would refuse, moves the bytes, writes down the calls. Objects are shared by all agents."""

    def __init__(self, plugin: Plugin, objects: dict[str, bytes], calls: list[str], states: list[str]) -> None:
        self.name = "fake"
        self._plugin, self._objects, self._calls, self._states = plugin, objects, calls, states
        self._registered: list[tuple[str, list[Descriptor]]] = []
        self._posted: tuple[str, Any, Any] | None = None
        calls.append(f"create {plugin.name}")

    def register_memory(self, reg_list: list[Descriptor], mem_type: str, backends: list[str]) -> Any:
        assert backends == [self._plugin.name]
        assert mem_type in (self._plugin.memory, self._plugin.storage)
        self._registered.append((mem_type, reg_list))
        self._calls.append(f"register {mem_type}")
        return self._registered[-1]

    def deregister_memory(self, dereg_list: Any, backends: list[str]) -> None:
        self._registered.remove(dereg_list)
        self._calls.append(f"deregister {dereg_list[0]}")

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        return mem_type, descs

    def initialize_xfer(
        self, operation: str, local: Any, remote: Any, agent: str, notif_msg: bytes, backends: list[str]
    ) -> Any:
        assert agent == self.name and local[0] == self._plugin.memory and remote[0] == self._plugin.storage
        for mem_type, [desc] in (local, remote):
            assert any(mem_type == kind and desc == known[0][:3] for kind, known in self._registered), desc
        assert local[1][0][1] == remote[1][0][1], "lengths differ"
        self._calls.append(f"initialize {operation}")
        return operation, local[1][0], remote[1][0]

    def transfer(self, handle: Any) -> str:
        self._posted = handle
        self._calls.append("transfer")
        return self._state()

    def check_xfer_state(self, handle: Any) -> str:
        assert handle is self._posted
        self._calls.append("check")
        return self._state()

    def release_xfer_handle(self, handle: Any) -> None:
        assert handle is self._posted
        self._posted = None
        self._calls.append("release")

    def _state(self) -> str:
        """The next state of the script; without one the bytes are moved: DONE."""
        if self._states:
            return self._states.pop(0)
        assert self._posted is not None
        operation, (address, length, _), (offset, _, fd) = self._posted
        name = next(known[0][3] for kind, known in self._registered if kind == self._plugin.storage)
        memory = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        if self._plugin.storage == "OBJ":
            if operation == "WRITE":
                self._objects[name] = bytes(memory)
            elif len(self._objects[name]) != length:
                return "ERR"
            else:
                memory[:] = self._objects[name]
        elif operation == "WRITE":
            assert os.pwrite(fd, memory, offset) == length
        else:
            assert os.preadv(fd, [memory], offset) == length
        return "DONE"


class FakeGpu:
    """Device memory: host memory of its own, on device 3."""

    def __init__(self, calls: list[str]) -> None:
        self._calls, self._buffer = calls, mmap.mmap(-1, 4096)

    def lend(self, view: memoryview) -> tuple[int, int]:
        self._buffer = mmap.mmap(-1, len(view))  # aligned for O_DIRECT
        self._calls.append("lend")
        return ctypes.addressof(ctypes.c_char.from_buffer(self._buffer)), 3

    def load(self, view: memoryview) -> None:
        self._buffer[:] = view
        self._calls.append("load")

    def store(self, view: memoryview) -> None:
        view[:] = self._buffer
        self._calls.append("store")

    def end(self) -> None:
        self._calls.append("end")


class Rig:
    """Tiers over one fake world."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.states: list[str] = []

    def agent(self, plugin: Plugin) -> FakeAgent:
        return FakeAgent(plugin, self.objects, self.calls, self.states)

    def tier(self, url: str, clock: FakeClock | None = None, wanted: Wanted = SMALL, **options: str) -> NixlStorageTier:
        staging = FakeGpu(self.calls) if "gds" in url else InPlace()
        return NixlStorageTier(
            wanted.config(url, **options),
            clock or FakeClock(),
            new_agent=self.agent,
            staging=staging,
            **wanted.limits(),
        )

    def taken(self) -> list[str]:
        calls, self.calls[:] = list(self.calls), []
        return calls


def moved(operation: str, memory: str, storage: str) -> list[str]:
    """The calls of one transfer, in order."""
    before = [f"register {memory}", f"register {storage}", f"initialize {operation}", "transfer"]
    return [*before, "release", f"deregister {storage}", f"deregister {memory}"]


# ---- GDS, GDS_MT, OBJ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["nixl-gds", "nixl-gds-mt"])
async def test_gds_moves_values_between_files_and_gpu_memory(tmp_path: Path, scheme: str) -> None:
    """Host → GPU → file and back, each buffer registered before and deregistered after its transfer."""
    rig, value = Rig(), value_of("k", 10_000)
    tier = rig.tier(f"{scheme}://{tmp_path}/kv")
    await tier.open()
    async with closing(tier):
        t = Opened(tier, FakeClock())
        assert rig.taken() == ["create GDS" if scheme == "nixl-gds" else "create GDS_MT"]
        assert await t.put(key_of("k"), value) is Outcome.STORED
        assert rig.taken() == ["lend", "load", *moved("WRITE", "VRAM", "FILE"), "end"]
        assert await t.get(key_of("k")) == value
        assert rig.taken() == ["lend", *moved("READ", "VRAM", "FILE"), "store", "end"]
        [file] = (tmp_path / "kv").glob("*-*")
        assert file.read_bytes()[HEADER_BYTES:][:10_000] == value


async def test_objects_are_named_by_key_and_emptied_when_erased(tmp_path: Path) -> None:
    """PREFIX + KEY-GENERATION; NIXL cannot delete, so one byte stays. Found after a restart by the index."""
    rig, value, url = Rig(), value_of("k", 5000), f"nixl-obj://bucket/kv?index={tmp_path}/index"
    async with closing(rig.tier(url)) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        assert await t.put(key_of("k"), value) is Outcome.STORED
        assert rig.taken() == ["create OBJ", *moved("WRITE", "DRAM", "OBJ")]
        name = f"kv/{key_of('k').hex()}-{1:016x}"
        assert rig.objects == {name: value}
    async with closing(rig.tier(url)) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        assert await t.get(key_of("k")) == value
        assert rig.taken() == ["create OBJ", *moved("READ", "DRAM", "OBJ")]
        assert await tier.delete([key_of("k")], t.soon) == 1
        assert rig.taken() == moved("WRITE", "DRAM", "OBJ")
        assert rig.objects == {name: b"\0"}
        assert not list((tmp_path / "index").glob("*-*"))


async def test_an_object_that_is_gone_or_changed_is_a_counted_miss(tmp_path: Path) -> None:
    rig = Rig()
    async with closing(rig.tier(f"nixl-obj://bucket?index={tmp_path}/index")) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        await t.stored("cut", "changed", num_bytes=5000)
        for name, value in rig.objects.items():
            cut = name.removeprefix("pdxfer/").startswith(key_of("cut").hex())
            rig.objects[name] = value[:100] if cut else b"x" + value[1:]
        assert await t.get(key_of("cut")) is None
        assert await t.get(key_of("changed")) is None
        assert tier.stats().failures == {"io_error": 1, "corrupt": 1}


# ---- when it goes wrong ------------------------------------------------------------------------------------------


def write(rig: Rig, pauses: list[float], where: Path) -> None:
    """Five bytes by a new mover."""
    mover = Mover(Plugin(name="POSIX"), InPlace(), new_agent=rig.agent, pause=pauses.append)
    with where.open("wb") as file:
        mover.move("WRITE", memoryview(bytearray(b"value")), (0, 5, file.fileno(), ""))


def test_a_transfer_is_looked_at_until_it_is_done(tmp_path: Path) -> None:
    """At first without a pause, then with growing ones; everything registered is let go."""
    rig, pauses = Rig(), []
    rig.states[:] = ["PROC"] * 200
    write(rig, pauses, tmp_path / "file")
    calls = rig.taken()
    assert [call for call in calls if call != "check"] == ["create POSIX", *moved("WRITE", "DRAM", "FILE")]
    assert calls.count("check") == 200 and len(pauses) == 200 - 64
    assert pauses == sorted(pauses) and pauses[-1] == 0.005
    assert (tmp_path / "file").read_bytes() == b"value"


def test_a_transfer_that_fails_lets_everything_go(tmp_path: Path) -> None:
    rig = Rig()
    rig.states[:] = ["PROC", "ERR"]
    with pytest.raises(OSError, match="WRITE ended as ERR"):
        write(rig, [], tmp_path / "file")
    calls = [call for call in rig.taken() if call != "check"]
    assert calls == ["create POSIX", *moved("WRITE", "DRAM", "FILE")]


async def test_a_failed_put_leaves_nothing(tmp_path: Path) -> None:
    rig = Rig()
    async with closing(rig.tier(f"nixl-posix://{tmp_path}/kv")) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        rig.states[:] = ["ERR"]
        assert await t.put(key_of("k"), b"value") is Outcome.FAILED
        assert tier.stats().failures == {"io_error": 1} and tier.stats().used_bytes == 0
        await t.stored("k")
        assert len(list((tmp_path / "kv").glob("*-*"))) == 1


async def test_a_file_that_is_gone_cut_or_changed_is_a_counted_miss(tmp_path: Path) -> None:
    """Also a value put in another's place; while open, and found at the next start."""
    rig, url = Rig(), f"nixl-posix://{tmp_path}/kv"

    def path(name: str) -> Path:
        [found] = (tmp_path / "kv").glob(f"{key_of(name).hex()}-*")
        return found

    async with closing(rig.tier(url)) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        names = ("gone", "cut", "changed", "swapped", "good", "later_cut", "later_changed", "later_swapped")
        await t.stored(*names, num_bytes=5000)
        path("gone").unlink()
        os.truncate(path("cut"), 5000)
        path("changed").write_bytes(path("changed").read_bytes()[:HEADER_BYTES] + bytes(8192))
        path("swapped").write_bytes(path("good").read_bytes())
        for name in names[:4]:
            assert await t.get(key_of(name)) is None, name
        assert tier.stats().failures == {"vanished": 1, "short": 1, "corrupt": 2}
        assert await t.get(key_of("good")) == value_of("good", 5000)
        await t.stored("more")  # what was dropped is erased with the next put
        os.truncate(path("later_cut"), 5000)
        with path("later_changed").open("r+b") as file:
            file.write(b"other")
        path("later_swapped").write_bytes(path("good").read_bytes())
        (tmp_path / "kv" / f"{path('good').name}.tmp").write_bytes(b"half")
        (tmp_path / "kv" / f"{'0' * 64}-{7:016x}.tmp").write_bytes(b"half")
        (tmp_path / "kv" / "notes.txt").write_bytes(b"not ours")
        (tmp_path / "kv" / "notes.txt.tmp").write_bytes(b"not ours")
    async with closing(rig.tier(url)) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        assert tier.stats().failures == {"short": 1, "corrupt": 2}
        assert await t.holds(*names, "more") == [*(name == "good" for name in names), True]
        assert len(list((tmp_path / "kv").glob("*-*"))) == 2
        assert (tmp_path / "kv" / "notes.txt").exists() and (tmp_path / "kv" / "notes.txt.tmp").exists()


async def test_a_directory_has_one_process_and_one_format(tmp_path: Path) -> None:
    rig, url = Rig(), f"nixl-posix://{tmp_path}/kv"
    async with closing(rig.tier(url)) as tier:
        await tier.open()
        with pytest.raises(ConfigError, match="in use by process"):
            await rig.tier(url).open()
    (tmp_path / "kv" / "pdxfer.format").write_bytes(b"\x09\0\0\0")
    with pytest.raises(ConfigError, match="format version 9"):
        await rig.tier(url).open()


async def test_a_plug_in_that_does_not_start_says_what_to_do(tmp_path: Path) -> None:
    """GDS on a machine without its libraries: the real NIXL, which refuses."""
    tier = NixlStorageTier(SMALL.config(f"nixl-gds://{tmp_path}/kv"), FakeClock(), staging=InPlace())
    with pytest.raises(ConfigError, match="plug-in GDS does not start here.*libcufile"):
        await tier.open()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nixl-posix://host/dir", "three slashes"),
        ("nixl-posix://", "directory of its own"),
        ("nixl-posix:///kv?direkt=true", "did you mean 'direct'"),
        ("nixl-obj:///kv?index=/i", "must name one bucket"),
        ("nixl-obj://bucket/kv", "index=/DIR"),
        ("nixl-tape:///kv", "NIXL tiers are"),
    ],
)
def test_a_wrong_url_says_what_to_change(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_nixl_options(SMALL.config(url))


def test_settings_of_objects_reach_the_plug_in() -> None:
    options = read_nixl_options(
        SMALL.config("nixl-obj://me:s%40cret@bucket/kv?index=/i&endpoint=http://h:9000&region=eu")
    )
    assert dict(options.plugin.parameters) == {
        "bucket": "bucket",
        "access_key": "me",
        "secret_key": "s@cret",
        "region": "eu",
        "endpoint_override": "h:9000",
        "scheme": "http",
    }
    assert (options.prefix, options.directory) == ("kv/", "/i") and "s@cret" not in repr(options)


def test_the_header_is_these_bytes() -> None:
    """Golden; and one flipped byte anywhere in it is refused."""
    record = Record(
        key=bytes(range(32)), num_bytes=5000, tenant="tenant", created_wall=1.5, pin_until=2.5, digest=77, generation=3
    )
    page = pack_header(record)
    assert len(page) == HEADER_BYTES and not any(page[128:])
    assert page[:128].hex() == GOLDEN
    again = unpack_header(page)
    assert again is not None and name_of(again) == name_of(record) == bytes(range(32)).hex() + "-0000000000000003"
    for at in range(128):
        assert unpack_header(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None


GOLDEN = (
    "5044584e49584c000100000006000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "881300000000000003000000000000004d00000000000000000000000000f83f000000000000044074656e616e740000"
    "00000000000000000000000000000000000000000000000008270dd24865e215"
)


@pytest.mark.slow
def test_killed_again_and_again_no_wrong_byte_and_never_above_the_limit(tmp_path: Path) -> None:
    """kill -9 with `du` watched, through the real plug-in."""
    report = run_campaign(f"nixl-posix://{tmp_path}/kv", seconds=4.0, capacity=32 * MIB)
    print(report)
    assert report.wrong == 0 and report.damage == {}
    assert 0 < report.highest_du <= report.capacity
    assert report.kills >= 1 and report.read > 0


async def test_of_two_generations_of_a_key_the_newer_counts(tmp_path: Path) -> None:
    """A kill between a put and the erasure of what it replaced leaves both."""
    rig, url = Rig(), f"nixl-posix://{tmp_path}/kv"
    async with closing(rig.tier(url)) as tier:
        await tier.open()
        t = Opened(tier, FakeClock())
        assert await t.put(key_of("k"), b"old") is Outcome.STORED
        [old] = (tmp_path / "kv").glob("*-*")
        kept = old.read_bytes()
        await tier.delete([key_of("k")], t.soon)
        assert await t.put(key_of("k"), b"new") is Outcome.STORED
        old.write_bytes(kept)
    async with closing(rig.tier(url)) as tier:
        await tier.open()
        assert await Opened(tier, FakeClock()).get(key_of("k")) == b"new"
        assert len(list((tmp_path / "kv").glob("*-*"))) == 1
