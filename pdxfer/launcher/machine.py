"""What this machine offers to engines: the cores we may use, the GPUs, its name. Read once, passed to the plan."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from pdxfer.transport.device import is_nixl_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts that the plan depends on."""

    cpus: tuple[int, ...] = ()
    """Cores our processes may run on."""
    gpus: tuple[int, ...] = ()
    """Indices of the NVIDIA GPUs."""
    has_nixl: bool = True
    """Whether the library is installed that moves GPU memory."""
    hostname: str = "localhost"
    """Part of default engine ids."""


def this_machine() -> Machine:
    """Facts of the machine we run on."""
    return Machine(
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=tuple(range(len(_gpu_nodes()))),
        has_nixl=is_nixl_installed(),
        hostname=re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40].strip(".-") or "localhost",
    )


def _gpu_nodes() -> list[Path]:
    """Device nodes of NVIDIA GPUs that this container sees."""
    return [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
