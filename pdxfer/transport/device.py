"""What this host has for moving KV: whether a GPU's can be moved at all with what is configured and installed, RDMA.

Imports no library: launcher, doctor and node ask before anything is started.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pdxfer.core.install import pip_install

_HOST_ONLY = ("local", "tcp", "ucx")


def device_problem(kinds: Sequence[str], has_nixl: bool) -> str:
    """Why none of these kinds of channel can move KV in device memory; empty if one may. Plug-ins are believed."""
    reasons = []
    for kind in kinds:
        if kind not in (*_HOST_ONLY, "nixl") or (kind == "nixl" and has_nixl):
            return ""
        reasons.append(f"{kind}: {'NIXL is not installed' if kind == 'nixl' else 'reaches host memory only'}")
    what = pip_install("nixl") if "nixl" in kinds else "add nixl to it"
    return f"KV is in GPU memory, and no kind in transport.channels can move it ({'; '.join(reasons)}): {what}"


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel shows."""
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


def is_nixl_installed() -> bool:
    """Without importing it: that takes a second, and CUDA's libraries."""
    return any(find_spec(name) is not None for name in ("nixl_cu12", "nixl_cu13", "nixl"))
