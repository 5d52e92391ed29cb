"""The store process in the launcher's plan: one a host, before the engines, only where they share memory."""

import asyncio
from pathlib import Path

import pytest

from pdxfer.config.load import load
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.engine import Inputs
from pdxfer.launcher.machine import Machine
from pdxfer.launcher.plan import plan_all, plan_engine, plan_store
from pdxfer.launcher.ready import Prober


def inputs(*sets: str, config: str = "cpu-both") -> Inputs:
    loaded = load([config], sets, {}).config
    return Inputs(config=loaded, config_file="/run/c.yaml", machine=Machine(cpus=(0, 1), hostname="h"))


def test_one_engine_with_memory_of_its_own_has_no_store_process() -> None:
    assert [spec.name for spec in plan_engine(inputs(), "both")] == ["both-h-8200"]


def test_engines_that_share_memory_wait_for_the_store() -> None:
    """It leaves after them, and nothing secret of other tiers is in its command line."""
    shared = "store.shared_memory=/run/store.sock"
    secret = "store.tiers=[{url: 'dram:'}, {url: 'redis://user:hunter2@h'}]"
    store, engine = plan_engine(inputs(shared, secret), "both")
    assert (store.name, store.ready_url, engine.depends_on) == ("store", "unix:/run/store.sock", ("store",))
    assert store.stop_order > engine.stop_order and "hunter2" not in store.shown()
    names = {spec.name: spec for spec in plan_all(inputs(shared, "store.enabled=true", config="cpu-1p1d"))}
    assert list(names) == ["router", "store", "p0", "d0", "proxy"]
    assert names["d0"].depends_on == ("router", "store")


def test_the_store_alone_needs_its_socket() -> None:
    assert [spec.name for spec in plan_store(inputs("store.shared_memory=/run/store.sock"))] == ["store"]
    with pytest.raises(ConfigError, match="store.shared_memory"):
        plan_store(inputs())


async def test_a_socket_is_ready_when_it_accepts(tmp_path: Path) -> None:
    path = tmp_path / "s"
    prober = Prober(f"unix:{path}")
    waiting = asyncio.create_task(prober.until_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)
    async with asyncio.timeout(10):
        await waiting
    server.close()
