"""launch/quickstart.sh refuses in one line what cannot work, and its stages say what failed.

Bash only. The script runs as a copy without requirements beside it, so that no mistake of it can install anything.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GIB = 1024 * 1024


def bash(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-euc", script, "bash", *args], capture_output=True, text=True, timeout=30)


def check(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    return bash(f'. "$1"; shift; {name} "$@"', str(ROOT / "launch/lib/checks.sh"), *map(str, args))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("check_system", ("Linux", "glibc 2.28")),
        ("check_system", ("Linux", "glibc 2.41")),
        ("check_cpu", ("x86_64", "fpu avx2 sse", 0)),
        ("check_cpu", ("x86_64", "fpu", 1)),
        ("check_cpu", ("aarch64", "", 0)),
        ("check_python", ("3.11", "yes")),
        ("check_python", ("3.14", "yes")),
        ("check_disk", (8 * GIB, 0, "/here")),
        ("check_disk", (24 * GIB, 1, "/here")),
        ("check_memory", (8 * GIB,)),
        ("check_driver", ("580.65.06",)),
    ],
)
def test_a_machine_that_fits_is_accepted_silently(name: str, args: tuple[object, ...]) -> None:
    """The smallest that will do."""
    done = check(name, *args)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("check_system", ("Darwin", ""), "use a Linux machine"),
        ("check_system", ("Linux", "glibc 2.27"), "use a newer distribution"),
        ("check_system", ("Linux", ""), "here is another C library"),
        ("check_cpu", ("x86_64", "fpu avx sse", 0), "use a machine with AVX2"),
        ("check_cpu", ("riscv64", "", 0), "use an x86_64 or aarch64 machine"),
        ("check_cpu", ("aarch64", "", 1), "add --gpus 0"),
        ("check_python", ("3.10", "yes"), "found 3.10: install one"),
        ("check_python", ("3.15", "yes"), "found 3.15: install one"),
        ("check_python", ("", "no"), "found none: install one"),
        ("check_python", ("3.12", "no"), "apt install python3.12-venv"),
        ("check_disk", (8 * GIB - 1, 0, "/here"), "/here has 7.9 GiB free"),
        ("check_disk", (8 * GIB, 1, "/here"), "needs 24 GiB"),
        ("check_memory", (2 * GIB,), "2.0 GiB of memory are available"),
        ("check_driver", ("575.51",), "update it, or add --gpus 0"),
        ("check_driver", ("",), "not found by nvidia-smi"),
    ],
)
def test_a_machine_that_does_not_fit_is_told_what_to_do(name: str, args: tuple[object, ...], says: str) -> None:
    """One line on stderr, exit code 1."""
    done = check(name, *args)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cannot run here: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def quickstart(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(ROOT / "launch", folder / "launch")
    return subprocess.run([folder / "launch/quickstart.sh", *args], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("args", [("--sevre",), ("--gpus",), ("--gpus", "two"), ("--gpus=",), ("--gpus=-1",)])
def test_wrong_usage_is_exit_code_2(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Before anything is looked at or installed."""
    done = quickstart(tmp_path, *args)
    assert done.returncode == 2
    assert "--help" in done.stderr


def test_help_goes_to_stdout(tmp_path: Path) -> None:
    """With an example."""
    done = quickstart(tmp_path, "--help")
    assert done.returncode == 0
    assert "Example: launch/quickstart.sh" in done.stdout


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("ERROR: No matching distribution found for torch==9", " s: No matching distribution found"),
        ("WARNING: Retrying: NewConnectionError(...)\nERROR: No matching distribution", "index cannot be reached"),
        (
            "WARNING: ConnectTimeout: HTTPSConnectionPool(host='wheels.example', port=443)\nERROR: none",
            "wheels.example cannot be reached",
        ),
        ("Traceback\nOSError: disk", " s: OSError: disk"),
    ],
)
def test_a_failed_stage_gives_the_reason_and_the_log(tmp_path: Path, output: str, says: str) -> None:
    """Of this stage, though an earlier one left errors in the same log."""
    script = (
        'root=$1; . "$2"; work=$1 log=$1/log; echo "ERROR: earlier" >"$log"; failing() { echo "$text"; return 1; }; '
    )
    done = bash(script + 'text=$3; stage "torch" failing', str(tmp_path), str(ROOT / "launch/lib/install.sh"), output)
    assert done.returncode == 1
    assert re.search(r"torch failed after \d+ s: ", done.stderr)
    assert says in done.stderr
    assert f"{tmp_path}/log" in done.stderr


def test_an_installation_counts_until_what_decides_it_changes(tmp_path: Path) -> None:
    """The stamp holds for one lock file, one pyproject.toml and one place."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/bin/true")
    lock, project = tmp_path / "requirements/cpu.lock", tmp_path / "pyproject.toml"
    lock.write_text("a==1\n")
    project.write_text("")
    use = f'root={tmp_path}; . "{ROOT}/launch/lib/install.sh"; '
    assert bash(use + "installed cpu").returncode == 1
    assert bash(use + 'echo "cpu $(digest cpu)" >"$stamp"; installed cpu').returncode == 0
    lock.write_text("a==2\n")
    assert bash(use + "installed cpu").returncode == 1
    lock.write_text("a==1\n")
    assert bash(use + "installed cpu").returncode == 0
    (tmp_path / ".venv/bin/python").unlink()
    assert bash(use + "installed cpu").returncode == 1
