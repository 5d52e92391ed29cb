"""The built wheel works where the repository is not: commands, packaged configs, the plug-in that vLLM looks for.

It goes into an environment of its own that sees this one's third-party packages, so nothing is downloaded.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SITE = Path(sysconfig.get_path("purelib"))
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
DEADLINE_S = 120
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PDXFER_", "PIP_"))}


def run(*command: str | Path, cwd: Path) -> str:
    """Stdout of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout with what is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("pdxfer-*.whl")
    return built


@pytest.fixture(scope="module")
def bin_dir(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel in it. A path that a .pth file adds is searched last, and .pth files in it (of
    an editable installation) are not read: the checkout stays out of reach."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    (own_site,) = folder.glob("lib/python*/site-packages")
    (own_site / "packages.pth").write_text(f"{SITE}\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_configs(wheel: Path) -> None:
    """And nothing beside them."""
    names = zipfile.ZipFile(wheel).namelist()
    configs = {Path(name).name for name in names if name.startswith("pdxfer/configs/")}
    assert configs == {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"pdxfer"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_commands_run_outside_the_repository(bin_dir: Path, tmp_path: Path) -> None:
    """Packaged configs are found by name, in the installed package."""
    assert "launch" in run(bin_dir / "pdxfer", "--help", cwd=tmp_path)
    shown = run(bin_dir / "pdxfer", "config", "show", "--config", "cpu-1p1d", cwd=tmp_path)
    assert f"{bin_dir.parent}/lib" in shown and str(ROOT / "configs") not in shown
    plan = run(bin_dir / "pdxfer", "launch", "--role", "all", "--config", "fake-1p1d", "--dry-run", cwd=tmp_path)
    starts = [line.partition(":")[0] for line in plan.splitlines() if "ready when" in line]
    assert starts == ["router", "p0", "d0", "proxy"]
    assert str(bin_dir / "python") in plan and str(ROOT / "pdxfer") not in plan


@pytest.mark.slow
def test_vllm_finds_the_plugin_of_the_installed_package(bin_dir: Path, tmp_path: Path) -> None:
    """The entry point by which `"kv_connector": "PdxferConnector"` works without a module path."""
    code = (
        "import pdxfer.connector.plugin; from importlib.metadata import entry_points;"
        "print(*[p.value for p in entry_points(group='vllm.general_plugins') if p.name == 'pdxfer'][:1]);"
        "print(pdxfer.__file__)"
    )
    value, file = run(bin_dir / "python", "-c", code, cwd=tmp_path).split()
    assert value == "pdxfer.connector.plugin:register"
    assert Path(file).is_relative_to(bin_dir.parent)
