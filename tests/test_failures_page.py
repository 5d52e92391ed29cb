"""docs/failures.md names tests; each of them exists, and rows without one say so."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "failures.md"
SOURCES = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "pdxfer" / "testing").rglob("*.py")]


def test_every_test_that_the_page_names_exists() -> None:
    defined = {name for path in SOURCES for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) > 50
    assert not named - defined


def test_every_row_names_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cases = [row for row in rows if not row.startswith(("| step |", "| party |"))]
    assert len(cases) > 50
    for row in cases:
        last = row.rstrip(" |").rsplit("|", 1)[-1]
        assert "`test_" in last or "**not tested**" in last, row
