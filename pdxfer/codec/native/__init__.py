"""Binding of the C library (build.py): functions by name, in the version for this CPU. ctypes releases the GIL.

    encode = function("fp8_encode", c_int64, (POINTER, c_int64, POINTER))     # None: no library, use numba or numpy

A library that was not built, does not load, or is older than the C files beside it counts as absent, with one WARNING
that says why and what to do.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy.typing as npt

from pdxfer.codec.native import build

log = logging.getLogger(__name__)

POINTER = ctypes.c_void_p
"""Of an array argument; pass `pointer(array)`."""
REBUILD = "python -m pdxfer.codec.native"


class Library:
    """The loaded library, at one of the instruction sets it has."""

    def __init__(self, loaded: ctypes.CDLL, level: int) -> None:
        self._loaded = loaded
        self.level = level

    def function(self, name: str, result: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        """`name` typed for ctypes; raises AttributeError for one that is not there."""
        found = getattr(self._loaded, f"{name}_v{self.level}")
        found.restype, found.argtypes = result, list(arguments)
        return found  # type: ignore[no-any-return]  # ctypes knows no better


@cache
def library(level: int = 0) -> Library | None:
    """The library at instruction set `level` (0: the best this CPU runs), or None. Loaded once."""
    path = build.HERE / build.LIBRARY
    if not path.exists():
        log.warning("codecs run without their C library (%s is not there; %s builds it): slower", path, REBUILD)
        return None
    try:
        loaded = ctypes.CDLL(str(path))
        best = int(loaded.pdx_cpu_level_v1())
        loaded.pdx_digest_v1.restype = ctypes.c_char_p
        built_from = loaded.pdx_digest_v1().decode()
    except (OSError, AttributeError) as error:
        log.warning("codecs run without their C library: %s does not load (%s); %s", path, error, REBUILD)
        return None
    if built_from != build.digest():
        log.warning("codecs run without their C library: %s is of other sources; %s", path, REBUILD)
        return None
    if level > best:
        return None
    available = [number for number in (4, 3, 1) if number <= (level or best)]
    return Library(loaded, next(n for n in available if hasattr(loaded, f"pdx_digest_v{n}")))


def function(name: str, result: Any, arguments: Sequence[Any]) -> Callable[..., Any] | None:
    """`name` for this CPU; None where there is no library."""
    found = library()
    return found.function(name, result, arguments) if found else None


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """A C-contiguous array as a POINTER argument; keeps it alive, so that it may be a temporary of the call."""
    assert array.flags.c_contiguous, "arrays for C are contiguous"
    return array.ctypes.data_as(ctypes.c_void_p)
