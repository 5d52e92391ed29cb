"""Nodes that use each other's stores, end to end: fake engines with real tiers, a real router, REST and sockets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from peer_rig import ALL, NONE, TOKENS, VALUE_BYTES, Store, keys_of, local_tiers, nodes, one
from router_kit import wait_until
from status_rig import serving

from pdxfer.cli import main
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.node.peering import Peering, PeeringSettings
from pdxfer.store.open import open_tiers
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.transport.base import EndpointOptions, PeerId

pytestmark = pytest.mark.slow
KEYS = keys_of()


class Cluster:
    """Two nodes, `a` and `b`, and the controller."""

    def __init__(self, stores: dict[str, Store], api: TestClient, url: str) -> None:
        self.a, self.b, self.api, self.url = stores["a"], stores["b"], api, url

    def post(self, verb: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """A verb; the result of the one node that did it, or the answer if it was not done."""
        answer = self.api.post(f"/v1/cache/{verb}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()["parts"][0]["result"]["chunks"] if status == 200 else answer.json()  # type: ignore[no-any-return]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with serving(heartbeat_s=0.2, missed_heartbeats=50) as site:
        tiers = {name: [*local_tiers(tmp_path / name), TierConfig(url="peer:")] for name in "ab"}
        with (
            nodes(site.router.endpoint, tiers) as stores,
            TestClient(make_app(site.router, ControllerSettings())) as api,
        ):
            wait_until(lambda: all(e.ranks and e.ranks[0].tiers for e in site.router.snapshot().engines), 20, "stores")
            yield Cluster(stores, api, site.url)


def test_a_chunk_that_only_another_node_has_is_a_hit(cluster: Cluster) -> None:
    """Found by what the peer told, read from it, verified, and kept in memory here from then on."""
    cluster.a.save(KEYS)
    wait_until(lambda: cluster.b.held("peer", KEYS) == ALL, 10, "b to know")
    assert cluster.b.read(KEYS[0]) == (KEYS[0][:1] * VALUE_BYTES, "peer")
    cluster.api.post("/v1/cache/clear", json={"everything": True, "engines": ["a"]})
    wait_until(lambda: cluster.b.held("peer", KEYS) == NONE, 10, "b to know that they are gone")
    assert cluster.b.read(KEYS[1]) is None


def test_values_move_and_are_copied_between_nodes_both_ways(cluster: Cluster) -> None:
    """A copy stays at its source, a moved value leaves it, and doing it twice changes nothing."""
    a, b = cluster.a, cluster.b
    a.save(KEYS, tenant="t")
    there = {"from_engine": "a", "engines": ["b"], "tokens": TOKENS}
    assert cluster.post("copy", **there, to_tier="disk")["done"] == 4
    assert (a.held("dram", KEYS), b.held("disk", KEYS), b.held("dram", KEYS)) == (ALL, ALL, NONE)
    assert cluster.post("copy", **there, to_tier="disk")["already"] == 4
    moved = cluster.post("move", **there, to_tier="dram")
    assert (moved["done"], moved["removed"]) == (4, 4)
    assert (a.held("dram", KEYS), b.held("dram", KEYS)) == (NONE, ALL)
    assert b.tenants("dram", KEYS) == ["t"] * 4
    again = cluster.post("move", **there, to_tier="dram")
    assert (again["already"], again["removed"], again["failed"]) == (4, 0, {})
    back = cluster.post("move", from_engine="b", engines=["a"], tier="disk", everything=True, to_tier="disk")
    assert (back["done"], back["removed"]) == (4, 4)
    assert (a.held("disk", KEYS), b.held("disk", KEYS), b.held("dram", KEYS)) == (ALL, NONE, ALL)
    assert (a.leases(), b.leases()) == (0, 0)


def test_the_command_line_copies_between_nodes(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By prompt, to every other node where none is named."""
    cluster.a.save(KEYS)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    where = ["--from-engine", "a", "--to-tier", "disk", "--url", cluster.url]
    assert main.run(["cache", "copy", "--tokens-file", str(tokens), *where]) == 0
    assert "b/0" in (out := capsys.readouterr().out) and "done=4" in out
    assert cluster.b.held("disk", KEYS) == ALL


def test_what_is_pinned_at_its_source_stays_there(cluster: Cluster) -> None:
    """As in a move between tiers; the copy is made."""
    cluster.a.save(KEYS)
    cluster.api.post("/v1/cache/pin", json={"tokens": TOKENS, "engines": ["a"]})
    moved = cluster.post("move", from_engine="a", engines=["b"], tokens=TOKENS, to_tier="dram")
    assert (moved["done"], moved["removed"], moved["kept_pinned"]) == (4, 0, 4)
    assert (cluster.a.held("dram", KEYS), cluster.b.held("dram", KEYS)) == (ALL, ALL)


def test_what_cannot_be_done_between_nodes_is_refused(cluster: Cluster) -> None:
    """Each refusal says what to change."""
    for status, body, why in (
        (409, {"from_engine": "a", "engines": ["a"]}, "from itself"),
        (409, {"from_engine": "nobody", "engines": ["b"]}, "no engine nobody"),
        (409, {"from_engine": "a"}, "goes to one"),
        (502, {"from_engine": "a", "engines": ["b"], "to_tier": "peer"}, "no tier 'peer'"),
    ):
        answer = cluster.api.post("/v1/cache/move", json={"tokens": TOKENS, "to_tier": "dram", **body})
        assert answer.status_code == status and why in answer.text, answer.text


def test_a_value_that_is_damaged_at_its_source_is_not_copied_and_no_hit(cluster: Cluster) -> None:
    """Counted, and left where it is; the others are copied. Read through the peer tier, it is a miss."""
    cluster.a.save(KEYS[1:])
    cluster.a.put_raw("dram", KEYS[0], b"not a frame" * 100)
    wait_until(lambda: cluster.b.held("peer", KEYS) == ALL, 10, "b to know")
    assert cluster.b.read(KEYS[0]) is None
    moved = cluster.post("move", from_engine="a", engines=["b"], tokens=TOKENS, to_tier="dram")
    assert (moved["done"], moved["removed"], moved["failed"]) == (3, 3, {"damaged": 1})
    assert cluster.a.held("dram", KEYS) == [True, False, False, False]
    assert cluster.b.held("dram", KEYS) == [False, True, True, True]


def test_a_damaged_value_is_repaired_from_another_node(cluster: Cluster) -> None:
    """`verify --repair` where no other tier of the node has it."""
    cluster.a.save(KEYS)
    cluster.b.put_raw("dram", KEYS[0], b"not a frame" * 100)
    wait_until(lambda: cluster.b.held("peer", KEYS) == ALL, 10, "b to know")
    body = {"engines": ["b"], "tokens": TOKENS, "tier": "dram", "repair": True}
    [part] = cluster.api.post("/v1/cache/verify", json=body).json()["parts"]
    [dram] = part["result"]["tiers"]
    assert (dram["broken"], dram["repaired"]) == (1, 1)
    assert cluster.b.read(KEYS[0]) == (KEYS[0][:1] * VALUE_BYTES, "dram")


def test_a_source_that_is_lost_on_the_way_is_said_and_loses_nothing(cluster: Cluster) -> None:
    """The part fails with how far it came; what was copied is there, what was not is still at the source."""
    cluster.a.save(KEYS)
    assert cluster.a.node.store is not None and cluster.a.node.store.peering is not None
    peering = cluster.a.node.store.peering
    assert peering._service is not None
    peering._service.close()
    answer = cluster.post("move", status=502, from_engine="a", engines=["b"], tokens=TOKENS, to_tier="dram")
    [part] = answer["parts"]
    assert part["state"] == "failed" and "0 were copied" in part["error"]
    assert (cluster.a.held("dram", KEYS), cluster.b.held("dram", KEYS)) == (ALL, NONE)


def test_the_scheduler_half_finds_and_loads_what_a_peer_holds(cluster: Cluster) -> None:
    """Find is answered from the index, a load brings the bytes; what the peer has evicted ends the load short."""
    cluster.a.save(KEYS[:3])
    wait_until(lambda: cluster.b.held("peer", KEYS) == [True, True, True, False], 10, "b to know")
    assert cluster.b.find(KEYS) == 3
    cluster.a.drop_silently("dram", KEYS[2])
    assert cluster.b.load(KEYS[:3]) == 2
    assert cluster.b.find(KEYS) == 2


def test_engines_of_one_role_and_of_other_models(tmp_path: Path) -> None:
    """Two prefill engines have no channel between them, and read each other's stores; another model's knows neither."""
    with serving(heartbeat_s=0.2, missed_heartbeats=50) as site:
        tiers = {name: [*local_tiers(tmp_path / name), TierConfig(url="peer:")] for name in "ab"}
        with (
            nodes(site.router.endpoint, tiers, role="prefill") as stores,
            one(site.router.endpoint, "c", local_tiers(tmp_path / "c"), model="other") as other,
        ):
            wait_until(lambda: len(site.router.snapshot().engines) == 3, 20, "engines")
            stores["a"].save(KEYS)
            wait_until(lambda: stores["b"].held("peer", KEYS) == ALL, 10, "b to know")
            assert (stores["b"].num_peers, other.num_peers) == (1, 0)


def test_beyond_this_machine_only_with_keys(tmp_path: Path) -> None:
    """A reachable address without keys: `peer:` is refused, and without it nothing is served."""
    options = EndpointOptions(bind="0.0.0.0")
    config = StoreConfig(enabled=True, tiers=[TierConfig(url="peer:")])
    with pytest.raises(ConfigError, match="keys_dir"):
        Peering(PeeringSettings(options=options, is_secure=False), config)
    Peering(PeeringSettings(options=options, is_secure=True), config)
    quiet = Peering(PeeringSettings(options=options, is_secure=False), StoreConfig(enabled=True))
    thread = StoreThread(lambda: memory_store())
    thread.start(20)
    quiet.join(PeerId(engine_id="x", incarnation=1, rank=0), thread)
    assert quiet.address is None
    quiet.close()
    thread.close(5)


async def memory_store() -> TieredStore:
    config = StoreConfig(enabled=True, tiers=[TierConfig(url="dram:", capacity_gib=0.01)])
    return TieredStore(await open_tiers(config, SYSTEM_CLOCK), config, bytes(16))
