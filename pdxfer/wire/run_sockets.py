"""Where the halves of an engine find each other: one ipc socket a run, in a directory only this user can enter.

What killed engines left there is removed when the next one starts.
"""

import errno
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pdxfer.core.errors import ConfigError

_FRESH_S = 60.0


def socket_path(run_id: str) -> str:
    """ipc address for one engine run; `run_id` is vLLM's engine id, unique a run."""
    directory = Path(tempfile.gettempdir()) / f"pdxfer-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{directory} is a file where engines put their sockets: remove it, or set TMPDIR") from error
    if directory.stat().st_uid != os.getuid() or directory.stat().st_mode & 0o077:
        raise ConfigError(f"{directory} must belong to you and be closed to others: chmod 700 it, or set TMPDIR")
    _remove_dead(directory)
    return f"ipc://{directory}/{run_id[-40:]}"


def _remove_dead(directory: Path) -> None:
    """Sockets of engines that were killed: nobody listens there any more. A fresh one may be about to."""
    for path in directory.iterdir():
        with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError):
            if path.is_socket() and time.time() - path.stat().st_mtime > _FRESH_S:
                probe.setblocking(False)
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
