"""Each cache verb, from REST to the tiers of a node's real store (memory and disk): judged by what they then hold."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from router_kit import wait_until
from status_rig import serving

from pdxfer.cli import main
from pdxfer.codec.frame import read_header
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.kv.chunks import chunk_keys, extra_bytes, identity_digest
from pdxfer.node.node import Node
from pdxfer.node.settings import NodeSettings
from pdxfer.node.store_side import StoreSettings
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.store.chunk import NewChunk
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_kv import FakeCache
from pdxfer.testing.fake_link import MemberSettings
from pdxfer.testing.fake_member import FakeMember
from pdxfer.testing.fake_model import tokenize
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.wire.run_sockets import socket_path

BLOCK, CHUNK_BLOCKS = 16, 2
CHUNK = BLOCK * CHUNK_BLOCKS
IDENTITY = {"model": "fake", "rank": "0"}
TOKENS = list(range(100, 100 + 3 * CHUNK + BLOCK))
"""Three chunks and a partial one."""
MIB = 1 << 20


class Rig:
    """A node with a store on an event loop of its own thread, and the controller in front of it."""

    def __init__(self, node: Node, api: TestClient) -> None:
        self.node, self.api = node, api

    def keys(self, tokens: list[int] = TOKENS, salt: str = "", lora: str = "") -> list[bytes]:
        extras = [extra_bytes([salt])] if salt else []
        if lora:
            extras = [extra_bytes([("lora", lora)])] * (len(tokens) // BLOCK)
        cut = chunk_keys(tokens, extras, identity_digest(IDENTITY), CHUNK, "blake3", block_size=BLOCK)
        return [chunk.key for chunk in cut]

    def store(self, call: Any) -> Any:
        """Run a coroutine function of the store on its thread."""
        assert self.node.store is not None
        return self.node.store.thread.submit(call).result(20)

    def save(self, keys: list[bytes], tenant: str = "") -> None:
        """As an engine would; waits until every tier that is written through has them."""

        async def run(store: TieredStore) -> None:
            soon = store.clock.now() + 10
            for key in keys:
                data = bytes(key[:1]) * (64 << 10)
                await store.save(NewChunk(key=key, num_tokens=CHUNK, parts=[data]), soon, tenant=tenant)
            await store.writer.quiet(soon)

        self.store(run)

    def held(self, tier: int, keys: list[bytes]) -> list[bool]:
        """Which of the keys the tier itself has, asked behind the store's back."""

        async def run(store: TieredStore) -> list[bool]:
            found = await store.slots[tier].tier.lookup(keys, store.clock.now() + 10)
            return [entry is not None for entry in found]

        return self.store(run)  # type: ignore[no-any-return]

    def pinned(self, tier: int, keys: list[bytes]) -> list[bool]:
        async def run(store: TieredStore) -> list[bool]:
            found = await store.slots[tier].tier.lookup(keys, store.clock.now() + 10)
            return [entry is not None and entry.pinned for entry in found]

        return self.store(run)  # type: ignore[no-any-return]

    def codec(self, tier: int, key: bytes) -> str:
        """Read from the stored bytes."""

        async def run(store: TieredStore) -> str:
            lease = await store.slots[tier].tier.get(key, store.clock.now() + 10)
            assert lease is not None
            async with lease:
                return read_header(lease.view).codec

        return self.store(run)  # type: ignore[no-any-return]

    def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """A verb over REST that has to be done; the node's own result."""
        answer = self.api.post(f"/v1/cache/{verb}", json=body)
        assert answer.status_code == 200, answer.text
        [part] = answer.json()["parts"]
        return part["result"]  # type: ignore[no-any-return]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with serving() as site, engine(site.router.endpoint, tmp_path / "disk") as node:
        wait_until(lambda: any(r.tiers for e in site.router.snapshot().engines for r in e.ranks), 20, "a store")
        with TestClient(make_app(site.router, ControllerSettings())) as api:
            api.headers["x-site"] = site.url
            yield Rig(node, api)


@contextmanager
def engine(router: str, disk: Path) -> Iterator[Node]:
    """A FakeEngine for both roles whose node has a store, on a thread of its own."""
    ready: list[Node] = []
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with running(router, disk) as node:
            ready.append(node)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        wait_until(lambda: ready or not thread.is_alive(), 20)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@asynccontextmanager
async def running(router: str, disk: Path) -> AsyncIterator[Node]:
    cache = FakeCache(num_blocks=64, block_size=BLOCK, num_layers=2, block_bytes=1024)
    halves = socket_path(f"verbs-{id(cache):x}")
    dram = TierConfig(url="dram:", capacity_gib=64 / 1024)
    tiers = [dram, TierConfig(url=f"file://{disk}", capacity_gib=64 / 1024, write="none")]
    store = StoreSettings(
        config=StoreConfig(enabled=True, tiers=tiers), identity=IDENTITY, adapter=lambda path: f"digest of {path}"
    )
    nodes: list[Node] = []

    def make_node() -> Node:
        settings = NodeSettings(
            engine_id="e0", rank=0, halves_path=halves, router=router, chunk_blocks=CHUNK_BLOCKS, store=store
        )
        nodes.append(Node(settings, cache.region, {"model": "fake"}, endpoint_factories(["tcp"])))
        return nodes[0]

    async with FakeEngine(FakeEngineSettings(engine_id="e0", adapters={"sql": "/adapters/sql"})) as server:
        settings = MemberSettings(
            engine_id="e0", role="both", url=server.url, served_names=("fake",), max_model_len=900, router=router,
            security=None, halves_path=halves,
        )  # fmt: skip
        member = FakeMember(settings, cache, make_node)
        try:
            yield nodes[0]
        finally:
            await member.close()


ALL, NONE = [True] * 4, [False] * 4


@pytest.mark.slow
def test_lookup_finds_the_longest_prefix_by_tokens_text_and_chat(rig: Rig) -> None:
    """Per tier, in tokens, chunk by chunk; a salt is another prompt; text and chat are tokenised by the engine."""
    rig.save(rig.keys()[:2])
    found = rig.post("lookup", tokens=TOKENS)
    assert found["num_tokens"] == 2 * CHUNK
    dram, disk = found["tiers"]
    assert (dram["num_tokens"], disk["num_tokens"]) == (2 * CHUNK, 0)
    [first, _] = dram["chunks"]
    assert first["key"] == rig.keys()[0].hex() and first["codec"] == "raw" and not first["pinned"]
    assert rig.post("lookup", tokens=TOKENS, salt="s")["num_tokens"] == 0
    text = "one two three " * 40
    rig.save(rig.keys(tokenize(text))[:1])
    assert rig.post("lookup", text=text)["num_tokens"] == CHUNK
    chat = rig.api.post("/v1/cache/lookup", json={"messages": [{"role": "user", "content": text}]})
    assert chat.status_code == 200 and chat.json()["parts"][0]["result"]["num_tokens"] == 0


@pytest.mark.slow
def test_clear_removes_what_was_named_and_nothing_else(rig: Rig) -> None:
    """By prefix, tenant, tier, age, and all."""
    mine, theirs = rig.keys(), rig.keys(salt="other")
    rig.save(mine)
    rig.save(theirs, tenant="b")
    rig.post("copy", tokens=TOKENS, to_tier="disk")
    rig.post("clear", tokens=TOKENS, tier="dram")
    assert (rig.held(0, mine), rig.held(1, mine), rig.held(0, theirs)) == (NONE, ALL, ALL)
    rig.post("clear", everything=True, older_than_s=3600)
    assert (rig.held(1, mine), rig.held(0, theirs)) == (ALL, ALL)
    result = rig.post("clear", tenant="b")
    assert result["tiers"][0]["removed"] == 4 and rig.held(0, theirs) == NONE and rig.held(1, mine) == ALL
    rig.post("clear", everything=True)
    assert rig.held(1, mine) == NONE


@pytest.mark.slow
def test_pins_are_set_and_taken_away(rig: Rig) -> None:
    """As the tier itself has them; the reply counts them."""
    keys = rig.keys()
    rig.save(keys)
    assert rig.post("pin", tokens=TOKENS, tier="dram", ttl_s=3600)["tiers"][0]["pinned"] == 4
    assert rig.pinned(0, keys) == ALL
    assert rig.post("lookup", tokens=TOKENS)["tiers"][0]["chunks"][0]["pinned"]
    assert rig.post("unpin", tokens=TOKENS)["tiers"][0]["pinned"] == 0
    assert rig.pinned(0, keys) == NONE


@pytest.mark.slow
def test_copy_move_and_prefetch_between_tiers_both_ways(rig: Rig) -> None:
    """A copy stays, a moved value leaves its source, a prefetched one is in memory again."""
    keys = rig.keys()
    rig.save(keys)
    assert rig.post("copy", tokens=TOKENS, to_tier="disk")["chunks"]["done"] == 4
    assert (rig.held(0, keys), rig.held(1, keys)) == (ALL, ALL)
    rig.post("clear", tokens=TOKENS, tier="disk")
    assert rig.post("move", tokens=TOKENS, tier="dram", to_tier="disk")["chunks"]["removed"] == 4
    assert (rig.held(0, keys), rig.held(1, keys)) == (NONE, ALL)
    assert rig.post("prefetch", tokens=TOKENS)["chunks"]["done"] == 4
    assert rig.held(0, keys) == ALL
    rig.post("clear", tokens=TOKENS, tier="dram")
    assert rig.post("move", tier="disk", everything=True, to_tier="dram")["chunks"]["removed"] == 4
    assert (rig.held(0, keys), rig.held(1, keys)) == (ALL, NONE)


@pytest.mark.slow
def test_compress_and_decompress_in_place(rig: Rig) -> None:
    """The stored bytes say in which codec they are."""
    keys = rig.keys()
    rig.save(keys)
    done = rig.post("compress", tokens=TOKENS, tier="dram", codec="zstd")["chunks"]
    assert done["done"] == 4 and done["num_bytes_after"] < done["num_bytes_before"]
    assert {rig.codec(0, key) for key in keys} == {"zstd"}
    assert rig.post("decompress", tokens=TOKENS, tier="dram")["chunks"]["done"] == 4
    assert {rig.codec(0, key) for key in keys} == {"raw"}


@pytest.mark.slow
def test_export_and_import_one_file(rig: Rig, tmp_path: Path) -> None:
    """What was exported, cleared and imported is there again; other files are never written."""
    keys = rig.keys()
    rig.save(keys)
    path = str(tmp_path / "{engine}-{rank}.pdxkv")
    assert rig.post("export", tokens=TOKENS, path=path)["file"]["num_chunks"] == 4
    assert (tmp_path / "e0-0.pdxkv").stat().st_size > 4 * (64 << 10)
    rig.post("clear", everything=True)
    assert rig.held(0, keys) == NONE
    assert rig.post("import", path=path)["file"]["stored"] == 4
    assert rig.held(0, keys) == ALL
    for wrong in ("/etc/passwd", "relative.pdxkv"):
        answer = rig.api.post("/v1/cache/export", json={"tokens": TOKENS, "path": wrong})
        assert answer.status_code == 502 and ".pdxkv" in answer.text


@pytest.mark.slow
def test_verify_finds_damage_and_repairs_it(rig: Rig, tmp_path: Path) -> None:
    """A flipped bit on the disk is found, and put right from the copy in memory."""
    keys = rig.keys()
    rig.save(keys)
    rig.post("copy", tokens=TOKENS, to_tier="disk")
    assert [tier["intact"] for tier in rig.post("verify", everything=True)["tiers"]] == [4, 4]
    damage(tmp_path / "disk", keys[1][:1])
    disk = rig.post("verify", everything=True, tier="disk", repair=True)["tiers"][0]
    assert disk["broken"] >= 1 and disk["repaired"] == disk["broken"]
    assert rig.post("verify", tokens=TOKENS, tier="disk")["tiers"][0]["intact"] == 4


def damage(directory: Path, byte: bytes) -> None:
    """Flip one byte in each place where a value lies whose data is all `byte`."""
    num_places = 0
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        data, at = file.read_bytes(), -1
        with file.open("r+b") as out:
            while (at := data.find(byte * (32 << 10), at + 1)) >= 0:
                out.seek(at + 2000)
                out.write(bytes([byte[0] ^ 0x40]))
                num_places += 1
                at += 64 << 10
    assert num_places, "no file holds that value"


@pytest.mark.slow
def test_the_command_line_does_the_same(rig: Rig, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`pdxfer cache`: text and JSON, long operations, exit codes."""
    url = rig.api.headers["x-site"]
    keys = rig.keys()
    rig.save(keys)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))

    def run(*args: str) -> tuple[int, str, str]:
        code = main.run(["cache", *args, "--url", url])
        return code, *capsys.readouterr()

    code, out, _ = run("lookup", "--tokens-file", str(tokens))
    assert code == 0 and str(len(TOKENS)) in out and "dram" in out
    code, out, _ = run("lookup", "--tokens-file", str(tokens), "--json")
    assert json.loads(out)["parts"][0]["result"]["num_tokens"] == len(TOKENS)
    assert run("pin", "--tokens-file", str(tokens))[0] == 0 and rig.pinned(0, keys) == ALL
    code, out, _ = run("clear", "--tier", "dram", "--no-wait", "--json")
    op_id = json.loads(out)["id"]
    assert run("check-finish", op_id)[0] == 0 and rig.held(0, keys) == NONE
    assert op_id in run("operations")[1]
    assert run("cancel", op_id)[0] == 0
    code, out, err = run("clear")
    assert (code, out) == (2, "") and "which values" in err
    assert run("lookup", "--text", "hello world")[0] == 0
    code, _, err = run("copy", "--text", "hello " * 40, "--to-tier", "nowhere")
    assert code == 1 and "no tier 'nowhere'" in err


async def test_an_engine_without_a_store_is_not_asked() -> None:
    """The router never sends it an operation."""
    router = RouterServer(RouterSettings(bind="tcp://127.0.0.1:*"))
    router.start()
    try:
        api = TestClient(make_app(router, ControllerSettings()))
        answer = await asyncio.to_thread(api.post, "/v1/cache/verify", json={"everything": True})
        assert answer.status_code == 409 and "store.enabled" in answer.text
    finally:
        router.close()


@pytest.mark.slow
def test_a_lora_adapter_is_named_as_clients_name_it(rig: Rig) -> None:
    """Its KV is another identity: found under its name, by text and by tokens, and not under the model's."""
    text = "one two three " * 40
    rig.save(rig.keys(tokenize(text), lora="digest of /adapters/sql")[:1])
    assert rig.post("lookup", text=text, model="sql")["num_tokens"] == CHUNK
    assert rig.post("lookup", tokens=tokenize(text), model="sql")["num_tokens"] == CHUNK
    assert rig.post("lookup", text=text, model="fake")["num_tokens"] == 0
    assert rig.post("lookup", text=text)["num_tokens"] == 0
    rig.post("clear", text=text, model="fake")
    assert rig.post("lookup", text=text, model="sql")["num_tokens"] == CHUNK
    rig.post("clear", text=text, model="sql")
    assert rig.post("lookup", text=text, model="sql")["num_tokens"] == 0
    refused = rig.api.post("/v1/cache/lookup", json={"tokens": [1, 2, 3], "model": "nope"})
    assert refused.status_code == 422 and "no engine serves 'nope'" in refused.text
