"""`top`, `status`, `nodes`, `events` and completion against a simulated cluster."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console
from router_kit import wait_until
from sim_cluster import SimCluster
from status_rig import Site, serving

from pdxfer.cli import main
from pdxfer.cli.screen import screen

CLI = [sys.executable, "-m", "pdxfer.cli.main"]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as site, SimCluster(site.router, 32, 32) as cluster:
        wait_until(lambda: cluster.num_served > 20, 30)
        yield site


def run(capsys: pytest.CaptureFixture[str], site: Site, *args: str) -> tuple[int, str, str]:
    code = main.run([*args, "--url", site.url])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_top_shows_nodes_rates_credits_tiers_and_ttft(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Once as text, once as JSON."""
    code, out, err = run(capsys, site, "top", "--once")
    assert (code, err) == (0, "")
    for text in (
        "READY",
        "64 engines",
        "1024 pairs",
        "p50",
        "p99",
        "CREDIT",
        "dram",
        "disk",
        "HITS",
        "/8192",
        "prefill",
    ):
        assert text in out, text
    code, out, _ = run(capsys, site, "top", "--json")
    summary = json.loads(out)
    assert code == 0 and len(summary["nodes"]) == 64 and summary["ttft_p99_ms"] > 0


@pytest.mark.slow
def test_top_fits_the_terminal(site: Site) -> None:
    """64 nodes on 40 lines: the busiest, and how many more there are."""
    console = Console(width=80, height=40, record=True, file=open("/dev/null", "w"))
    console.print(screen(site.board.summary(), 40))
    lines = console.export_text().splitlines()
    assert len(lines) <= 40 and any("more engines" in line for line in lines)
    console.file.close()


@pytest.mark.slow
def test_status_of_64_nodes_fits_a_screen(site: Site) -> None:
    """The whole process; it takes less than a second, which only a quiet machine can show (the full tier)."""
    took = []
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run([*CLI, "status", "--url", site.url], capture_output=True, text=True, timeout=30)
        took.append(time.monotonic() - start)
        assert done.returncode == 0 and done.stdout.startswith("ready\n64 engines, 1024 pairs"), done.stderr
        assert len(done.stdout.splitlines()) <= 24
    print(f"pdxfer status of 64 nodes: {min(took):.2f} s")
    assert min(took) < 1.0 or os.environ.get("PDXFER_TIER") != "full", took


@pytest.mark.slow
def test_engines_are_changed_and_looked_after(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """credit, policy, health; a refusal is one line that says why."""
    assert run(capsys, site, "nodes", "health")[0] == 0
    code, out, _ = run(capsys, site, "nodes", "credit", "d3", "9", "--json")
    assert code == 0 and json.loads(out)["credit_limit"] == 9
    assert run(capsys, site, "nodes", "credit", "d3", "none")[0] == 0
    assert run(capsys, site, "nodes", "credit", "d3", "many")[0] == 2
    code, out, _ = run(capsys, site, "nodes", "policy", "max_queue=77")
    assert code == 0 and "max_queue          77" in out
    code, out, err = run(capsys, site, "nodes", "role", "d3", "prefill")
    assert (code, out) == (1, "") and "started as decode" in err and err.count("\n") == 1


@pytest.mark.slow
def test_events_can_be_followed(site: Site) -> None:
    """One JSON object a line, as they come."""
    process = subprocess.Popen(
        [*CLI, "events", "--follow", "--json", "--url", site.url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        kinds = {json.loads(process.stdout.readline())["kind"] for _ in range(60)}
        assert "joined" in kinds
        site.router.drain("p1", True)
        assert any(json.loads(line)["kind"] == "drain" for line in process.stdout)
        site.router.drain("p1", False)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_shell_completes_commands_and_options(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Bash, without starting Python; scripts for the other shells exist."""
    for shell in ("bash", "zsh", "fish"):
        assert main.run(["completion", shell]) == 0
    script = capsys.readouterr().out.split("complete -o filenames")[0]
    ask = 'COMP_WORDS=(pdxfer {words}); COMP_CWORD={at}; _pdxfer; echo "${{COMPREPLY[@]}}"'
    for words, at, expected in [("sta", 1, "status"), ("nodes ro", 2, "role"), ("top --on", 2, "--once")]:
        text = f"{script}\n{ask.format(words=words, at=at)}"
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=10)
        assert done.stdout.strip() == expected, done.stderr
