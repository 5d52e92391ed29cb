"""How an optional part of pdxfer is installed here, for hints: of the source tree we were installed from, if we were.

Asked by whoever misses a library. Imports nothing of ours; reads only the metadata of the installation.
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def pip_install(*extras: str) -> str:
    """`pip install 'pdxfer[nixl]'`, or `pip install -e '.[nixl]'` with the clone's place."""
    what, tree = ",".join(extras), _source_tree()
    if tree is None:
        return f"pip install 'pdxfer[{what}]'"
    place, is_editable = tree
    shown = "." if place == Path.cwd() else str(place)
    return f"pip install {'-e ' if is_editable else ''}'{shown}[{what}]'"


def _source_tree() -> tuple[Path, bool] | None:
    """The directory that pip installed from (PEP 610), and whether as editable; None for a wheel."""
    try:
        text = distribution("pdxfer").read_text("direct_url.json")
    except PackageNotFoundError:  # run from a tree that was never installed
        place = Path(__file__).resolve().parents[2]
        return (place, True) if (place / "pyproject.toml").is_file() else None
    told = json.loads(text) if text else {}
    place = Path(unquote(urlsplit(str(told.get("url", ""))).path))
    if "dir_info" not in told or not (place / "pyproject.toml").is_file():
        return None
    return place, bool(told["dir_info"].get("editable"))
