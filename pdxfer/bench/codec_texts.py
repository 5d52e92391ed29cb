"""Real text for the codec bench, from what every installation has: CPython's library and packages we depend on.

Held-out texts (prose, code, a README, licences, documentation with examples) measure; calibration texts are others.
"""

import sysconfig
from importlib.metadata import distribution
from pathlib import Path

from pdxfer.bench.texts import real_text


def held_out() -> dict[str, str]:
    """Name → text, each at least 2,400 tokens of a usual tokenizer."""
    return {
        "prose": real_text()[:16000],
        "code": _library("argparse.py")[:16000],
        "readme": _readme("fastapi")[:18000],
        "licence": _library("LICENSE.txt"),
        "doc": _library("doctest.py")[3000:19000],
    }


def calibration() -> list[str]:
    """Texts to learn from, each at least 2,048 tokens; none of them held out."""
    return [
        _library("statistics.py")[:14000],
        _readme("aiohttp") + _readme("uvicorn") + _readme("psutil"),
        _library("pickletools.py")[:14000],
        _readme("numpy")[2000:16000] + _library("difflib.py")[:4000],
        _library("turtle.py")[3000:17000],
        _readme("rich") + _readme("typer"),
        _library("datetime.py")[:14000],
    ]


def _library(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8", errors="replace")


def _readme(package: str) -> str:
    return distribution(package).read_text("METADATA") or ""
