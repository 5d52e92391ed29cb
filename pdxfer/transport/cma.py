"""Reading another process's memory on this host: process_vm_readv (cross-memory attach), and who may do it.

One copy, made by the kernel into our memory, without help from the other process. ctypes drops the GIL meanwhile. The
kernel demands ptrace rights: same user, same pid namespace, and under Yama scope 1 the other process's consent.
"""

import ctypes
import os
from concurrent.futures import Executor
from ctypes import c_int, c_ulong, c_void_p
from pathlib import Path

from pdxfer.core.errors import ChannelError
from pdxfer.transport.vectors import IOV_MAX, Iovecs, skip

SPLIT_BYTES = 1 << 20
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value


class Reader:
    """Copies from one process; large copies are shared with a helper thread, as one core makes only half of memcpy."""

    def __init__(self, pid: int, helper: Executor | None = None) -> None:
        self.pid, self._helper = pid, helper
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call = self._libc.process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        self._call.argtypes = [c_int, c_void_p, c_ulong, c_void_p, c_ulong, c_ulong]

    def copy(self, target: Iovecs, source: Iovecs) -> None:
        """Fill our `target` from its `source`; equal lengths pair by pair. Raises ChannelError."""
        assert target.shape == source.shape and (target[:, 1] == source[:, 1]).all(), "iovecs do not pair up"
        half = len(target) // 2
        if self._helper is None or not half or int(target[:, 1].sum()) < SPLIT_BYTES:
            return self._range(target, source)
        rest = self._helper.submit(self._range, target[half:], source[half:])
        try:
            self._range(target[:half], source[:half])
        finally:
            rest.exception()  # nobody may be writing when this returns
        rest.result()

    def _range(self, target: Iovecs, source: Iovecs) -> None:
        for at in range(0, len(target), IOV_MAX):
            self._batch(target[at : at + IOV_MAX].copy(), source[at : at + IOV_MAX].copy())

    def _batch(self, target: Iovecs, source: Iovecs) -> None:
        while len(target):
            count = len(target)
            done = self._call(self.pid, target.ctypes.data, count, source.ctypes.data, count, 0)
            if done <= 0:
                raise ChannelError(f"cannot read memory of process {self.pid}: {_reason(ctypes.get_errno())}")
            target, source = skip(target, done), skip(source, done)


def _reason(number: int) -> str:
    hint = "; the kernel wants ptrace rights: same user, kernel.yama.ptrace_scope <= 1, in containers SYS_PTRACE"
    return os.strerror(number) + (hint if number == 1 else "")


def allow_readers() -> None:
    """Consent under Yama scope 1 (Ubuntu's default): processes of this user may read this one's memory.

    Changes this process until it ends. Without Yama (or at scope 0) the kernel ignores it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)


def host_id() -> str:
    """Names this boot of this kernel: equal in two processes that could share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Process ids mean the same in two processes with equal answers."""
    return os.readlink("/proc/self/ns/pid")
