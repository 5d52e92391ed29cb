"""Store mode on a real engine: KV survives the engine's cache and the process, and what is damaged is never used."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdxfer.bench.texts import Prompts
from tests.e2e.store_engine import StoreEngine

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the disk tier."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(directory: Path, logs: Path) -> Iterator[StoreEngine]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = StoreEngine(port, directory, logs / "store.log")
    yield engine
    code = engine.stop()
    assert code == 0, f"the launch's exit code was {code}:\n{engine.tail()}"


@pytest.mark.parametrize(
    ("length", "num_chunks", "loaded"), [(100, 0, 0), (128, 1, 128), (300, 1, 256), (512, 2, 512), (1500, 6, 1408)]
)
async def test_the_second_request_is_loaded_and_says_the_same(
    engine: StoreEngine, prompts: Prompts, length: int, num_chunks: int, loaded: int
) -> None:
    """After the engine's own cache was emptied; whole blocks of the last, incomplete chunk come back too."""
    ids, salt = prompts.ids(length, length), f"twice-{length}"
    first = await engine.ask_and_store(ids, salt, num_chunks)
    before = await engine.hits()
    second = await engine.ask(ids, salt)
    assert (second.tokens, await engine.hits() - before) == (first.tokens, loaded)


async def test_the_engine_knows_how_its_blocks_are_packed(engine: StoreEngine) -> None:
    """Lossy codecs could be used: the canary passed on the tensors that vLLM registered."""
    assert "no lossy codec" not in engine.log()


async def test_a_conversation_goes_on_from_what_was_generated(engine: StoreEngine, prompts: Prompts) -> None:
    """`save_decoded`: the next turn starts with prompt and answer of the last one."""
    ids = prompts.ids(250, 77)
    first = await engine.ask_and_store(ids, "talk", 3, 150, return_token_ids=True)
    longer = [*ids, *first.body["choices"][0]["token_ids"], *prompts.ids(60, 78)]
    before = await engine.hits()
    through = await engine.ask(longer, "talk")
    assert await engine.hits() - before == 384
    alone = await engine.ask(longer, "talk-alone")
    assert through.tokens == alone.tokens


async def test_what_another_prompt_shares_is_loaded(engine: StoreEngine, prompts: Prompts) -> None:
    """The engine has some blocks, the store has more, the end is new."""
    base = prompts.ids(700, 31)
    await engine.ask_and_store(base, "shared", 3)
    await engine.ask(base[:150], "shared")
    before, longer = await engine.hits(), [*base[:600], *prompts.ids(200, 32)]
    through = await engine.ask(longer, "shared")
    assert await engine.hits() - before == 512 - 128
    assert through.tokens == (await engine.ask(longer, "shared-alone")).tokens


async def test_another_salt_is_another_prompt(engine: StoreEngine, prompts: Prompts) -> None:
    """One tenant's prefix cannot be found under another's salt."""
    ids = prompts.ids(600, 5)
    await engine.ask_and_store(ids, "mine", 2)
    before = await engine.hits()
    await engine.ask(ids, "yours")
    assert await engine.hits() == before


async def test_damage_on_disk_is_a_counted_miss(engine: StoreEngine, directory: Path, prompts: Prompts) -> None:
    """Memory has forgotten the prompt, every value on disk has a flipped bit: recomputed, right, saved anew."""
    ids = prompts.ids(600, 902)
    first = await engine.ask_and_store(ids, "damaged", 2)
    for salt in range(3):
        await engine.ask_and_store(prompts.ids(1500, 910 + salt), f"other-{salt}", 6)
    flip(directory)
    before, hits = await engine.count("corrupt_chunks"), await engine.hits()
    assert (await engine.ask_and_store(ids, "damaged", 2)).tokens == first.tokens
    assert await engine.count("corrupt_chunks") > before
    hits = await engine.hits()
    assert (await engine.ask(ids, "damaged")).tokens == first.tokens
    assert await engine.hits() - hits == 512


@pytest.mark.full
async def test_hits_from_disk_after_kill_9(engine: StoreEngine, prompts: Prompts) -> None:
    """Everything is killed and started again: the same prompt is loaded, and says the same."""
    await engine.outlive(prompts.ids(1500, 901))


def flip(directory: Path) -> None:
    """One bit in each 64 KiB of the disk tier's values."""
    (slab,) = directory.rglob("slab")
    with slab.open("r+b") as file:
        for at in range(4096, slab.stat().st_size, 1 << 16):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
