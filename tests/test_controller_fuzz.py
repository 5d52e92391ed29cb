"""Whatever is sent to the management API, no answer is a 500: schemathesis over its own OpenAPI description."""

import logging
import os
import re
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from router_kit import SmallEngine, wait_until

from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.router.server import RouterServer, RouterSettings

ROUTER = RouterServer(RouterSettings(bind="tcp://127.0.0.1:*", heartbeat_s=0.5, missed_heartbeats=20))
APP = make_app(ROUTER, ControllerSettings())
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> object:
    """A pair without a store, so that verbs end at once."""
    ROUTER.start()
    members = [SmallEngine(ROUTER.endpoint, "p0", "prefill"), SmallEngine(ROUTER.endpoint, "d0", "decode")]
    wait_until(lambda: ROUTER.snapshot().is_ready, 20)
    yield
    for member in members:
        member.close()
    ROUTER.close()
    logging.getLogger("pdxfer").setLevel(logging.NOTSET)


@pytest.mark.slow
@schema.exclude(path_regex="/wait").parametrize()
@settings(
    max_examples=300 if os.environ.get("PDXFER_TIER") == "full" else 15, deadline=None, derandomize=True,
    phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_no_request_is_answered_with_a_500(case: schemathesis.Case) -> None:
    """Also none hangs: every wait is bounded."""
    if case.query and "wait_s" in case.query:
        case.query["wait_s"] = 0
    response = case.call(headers={"Accept": "application/json"})
    assert response.status_code != 500, response.text
    assert response.status_code < 500 or response.status_code in (502, 503, 504)


def test_every_route_is_described() -> None:
    """The OpenAPI covers what docs/operations.md promises."""
    paths = set(APP.openapi()["paths"])
    text = (Path(__file__).parent.parent / "docs/operations.md").read_text()
    for path in re.findall(r"`(?:GET|POST|PUT|PATCH) (/[^`?\s]*)", text):
        assert path in paths or any(re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", known), path) for known in paths), path
