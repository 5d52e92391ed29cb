"""Dashboard and alert rules name only metrics and labels that the catalogue has; what is exported is in it, too."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from router_kit import wait_until
from sim_cluster import SimCluster
from status_rig import serving

from pdxfer.controller.metrics import RouterMetrics
from pdxfer.metrics.catalog import CATALOG, EVENTS, MEMBERS, NODE_COUNTS

ROOT = Path(__file__).parent.parent
ROWS = {row.name: row for row in CATALOG}
NAME = re.compile(r"\bpdxfer_[a-z0-9_]+")
SELECTOR = re.compile(r"\b(pdxfer_[a-z0-9_]+)\{([^}]*)\}")


def expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads((ROOT / "launch/grafana/dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((ROOT / "launch/grafana/alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def row_of(name: str) -> str:
    """A series' row: histograms export three."""
    for suffix in ("_bucket", "_sum", "_count"):
        if name.removesuffix(suffix) in ROWS and ROWS[name.removesuffix(suffix)].kind == "histogram":
            return name.removesuffix(suffix)
    return name


@pytest.mark.parametrize(("title", "expr"), expressions())
def test_an_expression_names_what_is_exported(title: str, expr: str) -> None:
    """Names, labels and label values."""
    names = NAME.findall(expr)
    assert names, expr
    for name in names:
        assert row_of(name) in ROWS, f"{title}: {name} is not in metrics/catalog.py"
    for name, labels in SELECTOR.findall(expr):
        row = ROWS[row_of(name)]
        for label, value in re.findall(r'(\w+)!?="([^"]*)"', labels):
            assert label in row.labels, f"{title}: {name} has no label {label}"
            assert row.labels[label] is MEMBERS or value in row.labels[label], f"{title}: {label}={value}"
    known = {label for name in names for label in ROWS[row_of(name)].labels} | {"le"}
    for grouped in re.findall(r"by \(([^)]*)\)", expr):
        assert set(re.split(r",\s*", grouped)) <= known, f"{title}: {grouped}"
    counters = [name for name in names if ROWS[row_of(name)].kind != "gauge"]
    for name in counters:
        assert re.search(rf"(rate|increase)\({name}", expr), f"{title}: {name} is a counter and needs a rate"


def test_the_dashboard_is_whole() -> None:
    """Ids are unique, panels do not overlap, the data source is chosen by the viewer."""
    board = json.loads((ROOT / "launch/grafana/dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) and board["uid"] == "pdxfer"
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert all(p["datasource"]["uid"] == "${datasource}" for p in panels if p["type"] != "row")


def test_every_alert_says_what_to_do() -> None:
    """Summary, description and severity."""
    for group in yaml.safe_load((ROOT / "launch/grafana/alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith("."), rule["alert"]
            assert rule["labels"]["severity"] in ("info", "warning", "critical")


@pytest.mark.slow
def test_what_the_router_exports_is_the_catalogue() -> None:
    """Every series belongs to a row, every row of router and node has its family; members' figures come through."""
    with serving() as site, SimCluster(site.router, 1, 1) as cluster:
        metrics = RouterMetrics()
        site.router.listeners.append(metrics.on_router)
        wait_until(lambda: cluster.num_served > 2, 20)
        text = metrics.render(site.router.snapshot()).decode()
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    exported = {name for name in families if not name.endswith("_created")}
    wanted = {name for name, row in ROWS.items() if row.process in ("router", "node")}
    assert exported == wanted
    assert re.search(r'pdxfer_node_tier_hits_total\{engine="d0",tier="dram"\} [1-9]', text)
    assert 'pdxfer_node_open_channels{engine="p0"} 1.0' in text
    assert re.search(r'pdxfer_router_stage_seconds_count\{mode="pair",stage="ttft"\} [1-9]', text)


def test_what_engines_count_is_in_the_catalogue() -> None:
    """The names of the connector's and the node's counters, read from their source: importing them needs vLLM."""
    tree = ast.parse((ROOT / "pdxfer/connector/stats.py").read_text())
    [table] = [n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "HELP"]  # type: ignore[attr-defined]
    assert set(ast.literal_eval(table)) <= set(NODE_COUNTS)


def test_the_kinds_of_event_are_those_of_the_router() -> None:
    """No event goes uncounted."""
    source = "".join(path.read_text() for path in (ROOT / "pdxfer/router").glob("*.py"))
    used = set(re.findall(r'happened\(\s*"([a-z_]+)"', source))
    used |= {kind for pair in re.findall(r'kind = "([a-z_]+)" if .* else "([a-z_]+)"', source) for kind in pair}
    used |= {kind for pair in re.findall(r'happened\("(drain)" if on else "(undrain)"', source) for kind in pair}
    assert used == set(EVENTS)
