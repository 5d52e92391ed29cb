"""One process a place: a lock file that the kernel lets go of with its holder, however that ends."""

import fcntl
import os

from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_files import FileLayer, write_all


def take_lock(files: FileLayer, path: str, place: str, kind: str) -> int:
    """Descriptor of the locked file `path`. ConfigError names who holds it."""
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(files, fd, memoryview(f"{os.getpid():<10}\n".encode()), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 16, 0).decode("ascii", "replace").strip() or "unknown"
        files.close(fd)
        raise ConfigError(
            f"{kind} tier: {place} is in use by process {holder}; give each engine its own place in store.tiers[].url,"
            " or let them share one store process (store.shared_memory)"
        ) from error
    except OSError:
        files.close(fd)
        raise
    return fd
