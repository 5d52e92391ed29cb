"""Runs the rANS and plane kernels at one instruction set of the C library, or in numba."""

from typing import Any

import pytest

from pdxfer.codec import native, planes, rans

KINDS = (pytest.param("numba", marks=pytest.mark.slow), "v1", "v3", "v4")
"""numba compiles for half a minute first."""


def use(kind: str, patch: pytest.MonkeyPatch) -> bool:
    """Make `native=True` mean `kind`; False where this CPU has no such instruction set."""
    if kind == "numba":
        found: Any = lambda name: None  # noqa: E731
        patch.setattr(rans, "_native", found)
        patch.setattr(planes, "_native", found)
        return True
    library = native.library(int(kind[1:]))
    if library is None:
        return False
    signatures = {**rans.SIGNATURES, **planes.SIGNATURES}
    patch.setattr(rans, "_native", lambda name: library.function(name, *signatures[name]))
    patch.setattr(planes, "_native", lambda name: library.function(name, *signatures[name]))
    return True
