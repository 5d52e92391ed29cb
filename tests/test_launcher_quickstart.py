"""Quickstart: the whole run on fake engines, its verdict on whether KV moved, and what --serve prints."""

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from launch_rig import DEADLINE_S, Lines, free_ports, port_sets
from rich.console import Console

from pdxfer.launcher.quickstart import config_name, curl_line
from pdxfer.launcher.quickstart_measure import Compared, Measured, Stream
from pdxfer.launcher.quickstart_report import pays, print_report
from pdxfer.launcher.quickstart_requests import Answer, Moved, Question, text
from pdxfer.proxy.body import parse

ROOT = Path(__file__).parent.parent
QUICKSTART = [sys.executable, "-m", "pdxfer.launcher.quickstart", "--config", "fake-1p1d"]


def stream(longest_ms: float) -> Stream:
    return Stream(median_ms=20, longest_ms=longest_ms, num_tokens=9, prompt_ttft_ms=900)


def measured(moved: Moved) -> Measured:
    answer = Answer(text="yes", ttft_ms=100, num_prompt_tokens=1000, mode="pair", stages_ms={"queue": 1.0})
    compared = Compared(question=Question(name="long", prompt="p"), alone=answer, pair=answer, moved=moved)
    return Measured(compared=[compared], stream_alone=stream(800), stream_pair=stream(30))


def printed(result: Measured) -> tuple[bool, str]:
    out = io.StringIO()
    return print_report(Console(file=out, width=80), result), out.getvalue()


@pytest.mark.slow
def test_the_whole_run_prints_answers_tables_and_what_moved() -> None:
    """On fake engines, which move real bytes; exit 0."""
    done = subprocess.run(
        [*QUICKSTART, *port_sets(free_ports(5))], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("(the same)") == 3  # a line may end within it
    assert len(re.findall(r"KV moved  [13],000 tokens: [\d.]+ MB in \d+ units over tcp", done.stdout)) == 2
    assert "longest stall" in done.stdout and "A pair" in done.stdout or "In this run" in done.stdout
    assert "waiting for" in done.stderr and "asking: 3,000 tokens, pair" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("min_tokens", [16, 256, 2000])
def test_the_suggested_request_is_long_enough_for_the_pair(min_tokens: int) -> None:
    """As the proxy counts it, after a shell has read the line; each word is a token at least."""
    line = curl_line("http://127.0.0.1:8000", "demo", min_tokens)
    words = subprocess.run(
        ["sh", "-c", line.replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True, timeout=10
    ).stdout.splitlines()
    assert words[:2] == ["-N", "http://127.0.0.1:8000/v1/chat/completions"]
    parsed = parse("chat", words[-1].encode(), str)
    assert parsed.model == "demo" and parsed.num_tokens >= min_tokens
    assert json.loads(words[-1])["messages"][0]["content"].count("hello") >= min_tokens


@pytest.mark.slow
def test_serve_prints_a_curl_line_and_stays_up_until_a_signal() -> None:
    """Exit 0 after SIGINT."""
    process = subprocess.Popen(
        [*QUICKSTART, *port_sets(free_ports(5)), "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    lines = Lines(process.stdout)
    try:
        url = re.search(r"http://\S+/v1", lines.until("^curl"))
        assert url is not None
        with urllib.request.urlopen(f"{url[0]}/models", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        lines.close()


@pytest.mark.parametrize("moved", [Moved(reason="no channel to d0"), Moved(outcome="failed", num_bytes=5)])
def test_kv_that_did_not_move_is_said_loudly_and_fails(moved: Moved) -> None:
    """Also when some bytes came but the transfer failed."""
    has_moved, out = printed(measured(moved))
    assert not has_moved and "KV DID NOT MOVE  long:" in out


def test_moved_kv_is_told_in_bytes_units_and_channel() -> None:
    """As the proxy's timeline has it."""
    what = Moved(outcome="delivered", channel="local", num_bytes=23_000_000, num_units=120, num_tokens=1000)
    has_moved, out = printed(measured(what))
    assert has_moved and "23.0 MB in 120 units over local, 1000 of 1000 tokens" in " ".join(out.split())


def test_the_verdict_follows_the_figures() -> None:
    """A pair that did not help is not praised."""
    good = measured(Moved())
    assert "the longest stall fell from 800 to 30 ms" in pays(good)
    bad = Measured(compared=good.compared, stream_alone=stream(30), stream_pair=stream(40))
    assert "did not shorten the longest stall" in pays(bad)


def test_text_is_real_and_about_as_long_as_asked() -> None:
    """Whole paragraphs of documentation."""
    assert 800 * 4 < len(text(1000, "compound")) < 1300 * 4.3
    assert len(text(3000, "types")) > 3 * 800 * 4


def test_the_config_fits_the_gpus() -> None:
    """None, one that both share, one each."""
    assert [config_name(n) for n in (0, 1, 2, 8)] == ["cpu-1p1d", "gpu-1p1d-one-gpu", "gpu-1p1d", "gpu-1p1d"]
