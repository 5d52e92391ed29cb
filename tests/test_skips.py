"""What conftest.py promises: in CI nothing that should be installed is missing in silence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import pytest

def test_package():
    pytest.importorskip("no_such_package")

def test_tool():
    pytest.skip("no_such_tool is not installed")

@pytest.mark.skipif(True, reason="needs an NVIDIA GPU")
def test_machine(): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "outcome"), [("ci", "2 failed, 1 skipped"), ("fast", "3 skipped"), ("", "3 skipped")])
def test_a_missing_tool_fails_in_ci_and_skips_elsewhere(tmp_path: Path, tier: str, outcome: str) -> None:
    """What the machine cannot have is skipped everywhere."""
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = os.environ | {"PDXFER_TIER": tier, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert outcome in done.stdout, done.stdout + done.stderr
