"""Every shell block of README and docs is run here, or is marked as one that needs something else, and then listed.

<!-- run: KIND -->     on the line before a ```bash block
(no mark)              run here, in an empty directory
fake                   run here against `launch --role all` with fake engines; localhost:8000 is its proxy
cluster, long, gpu, two-hosts    not run here: see ELSEWHERE for who does
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_rig import DEADLINE_S, PORT_KEYS, Lines, free_ports

from pdxfer.config.reference import render

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WHOLE_PAGES = {"two-hosts.md": "two-hosts", "gpu.md": "gpu"}
"""Pages all of whose blocks are of one kind."""
ELSEWHERE = {
    "long": "the quickstart and the benches: tests/run.sh and tests of the benches",
    "cluster": "needs a cluster with real engines or a store: tests/e2e, tests/test_controller_verbs.py",
    "two-hosts": "tests/e2e/test_two_hosts.py runs the page's commands in network namespaces",
    "gpu": "not run: needs NVIDIA GPUs",
}
BLOCK = re.compile(
    r"(?:^<!-- run: (?P<kind>[a-z-]+) -->\n)?^```(?:bash|sh|shell|console)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    kind: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}-{self.number}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text()), 1):
            kind = match["kind"] or WHOLE_PAGES.get(page.name, "")
            found.append(Block(page.name, number, kind, match["text"]))
    return found


BLOCKS = blocks()


def run(block: Block, where: Path, **environment: str) -> None:
    """The block as a script that stops at its first failure."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(where), **environment}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=where, env=env, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.id}:\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
def test_a_block_is_of_a_known_kind(block: Block) -> None:
    """Those that are not run here are listed, with who runs them."""
    assert block.kind in ("", "fake", *ELSEWHERE), f"{block.id}: unknown mark {block.kind!r}"


def test_most_kinds_are_used() -> None:
    """The list of exceptions holds nothing that is gone."""
    assert set(ELSEWHERE) <= {block.kind for block in BLOCKS}


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.kind], ids=lambda block: block.id)
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    """In an empty directory, as a user with nothing set up."""
    run(block, tmp_path)


@pytest.fixture(scope="module")
def fake_cluster() -> Iterator[dict[str, str]]:
    """Ports of a running `launch --role all` with fake engines, as environment variables."""
    ports = free_ports(len(PORT_KEYS))
    named = dict(zip(PORT_KEYS, ports, strict=True))
    environment = {f"PDXFER_{key.upper().replace('.', '__')}": str(port) for key, port in named.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", "all", "--config", "fake-1p1d"],
        env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    lines = Lines(process.stderr)
    try:
        lines.until("everything is ready")
        yield {**environment, "PROXY": str(named["proxy.port"])}
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            lines.close()


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "fake"], ids=lambda block: block.id)
def test_a_block_runs_against_a_fake_cluster(block: Block, fake_cluster: dict[str, str], tmp_path: Path) -> None:
    """Ports come from the environment, which the commands read."""
    text = block.text.replace("localhost:8000", f"localhost:{fake_cluster['PROXY']}")
    run(Block(block.page, block.number, block.kind, text), tmp_path, **fake_cluster)


def test_the_configuration_page_is_the_schema() -> None:
    """Made, not written."""
    made = "python -m pdxfer.config.reference > docs/configuration.md"
    assert (ROOT / "docs/configuration.md").read_text().rstrip() == render().rstrip(), made


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """mkdocs --strict: no broken link."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")], cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/operations/index.html").exists()
