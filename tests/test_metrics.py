"""The catalogue is sound, and the arithmetic of the TTFT stages is right."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdxfer.metrics.catalog import CATALOG, Metric, MetricSet
from pdxfer.metrics.exporter import render
from pdxfer.metrics.timeline import Timeline, parse_header

SUFFIX = {"seconds": "_seconds", "bytes": "_bytes"}


def test_names_are_unique() -> None:
    names = [row.name for row in CATALOG]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", CATALOG, ids=lambda row: row.name)
def test_each_row_says_name_unit_and_help(row: Metric) -> None:
    """pdxfer_<process>_..., counters end in _total, others in their unit, help is a sentence."""
    assert re.fullmatch(r"pdxfer_(proxy|router|node|store)_[a-z0-9_]+", row.name)
    assert row.help.endswith(".")
    if row.kind == "counter":
        assert row.name.endswith("_total")
    else:
        assert row.name.endswith("_" + row.unit)


def test_recorded_values_are_exported() -> None:
    rows = (
        Metric(name="pdxfer_node_units_total", kind="counter", unit="units", help="Units.", labels={"way": ("in",)}),
        Metric(name="pdxfer_node_free_blocks", kind="gauge", unit="blocks", help="Free."),
        Metric(name="pdxfer_node_write_seconds", kind="histogram", unit="seconds", help="Writes."),
    )
    metrics = MetricSet("node", rows)
    metrics.inc("pdxfer_node_units_total", 3, way="in")
    metrics.set("pdxfer_node_free_blocks", 7)
    metrics.observe("pdxfer_node_write_seconds", 0.02)
    text = render(metrics).decode()
    assert 'pdxfer_node_units_total{way="in"} 3.0' in text
    assert "pdxfer_node_free_blocks 7.0" in text
    assert 'pdxfer_node_write_seconds_bucket{le="0.025"} 1.0' in text
    assert metrics.value("pdxfer_node_units_total", way="in") == 3.0


def test_a_label_value_outside_its_set_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="mode='made up'"):
        MetricSet("proxy").inc("pdxfer_proxy_requests_total", endpoint="chat", mode="made up", outcome="ok")


def test_a_metric_of_another_process_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="not in metrics/catalog.py"):
        MetricSet("router").inc("pdxfer_proxy_retries_total")


FULL = {"started": 10.010, "prefilled": 10.110, "landed": 10.115, "scheduled": 10.117}


def test_stages_of_a_pair_add_up_to_ttft() -> None:
    stages = Timeline(mode="pair", arrival=10.0, first_byte=10.150, stamps=FULL).stages_ms()
    assert stages == {
        "queue": pytest.approx(10),
        "prefill": pytest.approx(100),
        "exposed_transfer": pytest.approx(5),
        "decode_wait": pytest.approx(2),
        "first_decode": pytest.approx(33),
        "ttft": pytest.approx(150),
    }


def test_kv_that_landed_before_prefill_ended_was_not_exposed() -> None:
    stages = Timeline(mode="pair", arrival=10.0, first_byte=10.150, stamps={**FULL, "landed": 10.05}).stages_ms()
    assert stages["exposed_transfer"] == 0
    assert stages["decode_wait"] == pytest.approx(7)


def test_a_stage_with_an_unknown_end_is_left_out() -> None:
    stamps = {k: v for k, v in FULL.items() if k != "prefilled"}
    stages = Timeline(mode="pair", arrival=10.0, first_byte=10.150, stamps=stamps).stages_ms()
    assert set(stages) == {"queue", "decode_wait", "first_decode", "ttft"}


def test_nothing_is_said_before_the_first_byte() -> None:
    assert Timeline(mode="pair", arrival=10.0, stamps=FULL).stages_ms() == {}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {}, optional={name: st.floats(-1e6, 1e6) for name in ("started", "prefilled", "landed", "scheduled")}
    ),
    st.floats(-1e3, 1e3),
)
def test_clocks_that_disagree_never_give_a_negative_stage(stamps: dict[str, float], delay: float) -> None:
    """Whatever the stamps, stages are >= 0, and with all of them known they add up to ttft."""
    stages = Timeline(mode="pair", arrival=1000.0, first_byte=1000.0 + delay, stamps=stamps).stages_ms()
    assert all(ms >= 0 for ms in stages.values())
    if len(stamps) == 4:
        assert sum(ms for name, ms in stages.items() if name != "ttft") == pytest.approx(stages["ttft"])


def test_the_header_can_be_read_back() -> None:
    timeline = Timeline(mode="local", reason="no prefill; \r\nSet-Cookie: x", arrival=1.0, first_byte=1.5)
    header = timeline.header()
    assert "\n" not in header and "\r" not in header
    assert parse_header(header) == ({"mode": "local", "reason": "no_prefill____Set-Cookie__x"}, {"ttft": 500.0})


def test_a_header_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="not key=value"):
        parse_header("mode=pair; nonsense")
