"""How much memory a cache may take when nobody said: a quarter of what this container has."""

from pathlib import Path

import psutil

DEFAULT_FRACTION = 0.25


def default_capacity_bytes(root: Path = Path("/")) -> int:
    """A quarter of the smaller of the machine's memory and the cgroup's limit."""
    total: int = psutil.virtual_memory().total
    return int(DEFAULT_FRACTION * min([total, *cgroup_limits(root)]))


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Memory limits that bind this process, in bytes; cgroup v2 (its own group and all above) and v1."""
    files = [root / "sys/fs/cgroup/memory/memory.limit_in_bytes"]
    group = root / "sys/fs/cgroup" / _own_group(root / "proc/self/cgroup")
    while group.is_relative_to(root / "sys/fs/cgroup"):
        files.append(group / "memory.max")
        group = group.parent
    limits = (_number(file) for file in files)
    return [limit for limit in limits if limit is not None]


def _own_group(file: Path) -> str:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
