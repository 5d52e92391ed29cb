"""Many byte ranges in one system call, as numpy arrays: the kernel's struct iovec without a Python object a range.

Python's own sendmsg and recvmsg_into take a list of buffers and touch each one; with blocks of 16 KiB that costs as
much as the copy. ctypes drops the GIL during the call. Whoever calls keeps the memory alive.
"""

import ctypes
import errno
import os
import socket
from ctypes import c_int, c_size_t, c_ssize_t, c_void_p

import numpy as np
import numpy.typing as npt

from pdxfer.kv.runs import Runs

IOV_MAX = 1024
"""Ranges one call takes (Linux)."""

Iovecs = npt.NDArray[np.uint64]
"""Shape [R, 2]: address, length; laid out as the kernel's struct iovec."""


class _Msghdr(ctypes.Structure):
    _fields_ = [
        ("name", c_void_p),
        ("namelen", c_int),
        ("iov", c_void_p),
        ("iovlen", c_size_t),
        ("control", c_void_p),
        ("controllen", c_size_t),
        ("flags", c_int),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.restype, _call.argtypes = c_ssize_t, [c_int, c_void_p, c_int]


def iovecs(base: int, runs: Runs) -> Iovecs:
    """Addresses of runs in a region that begins at `base`."""
    vectors = np.empty(runs.shape, dtype=np.uint64)
    vectors[:, 0] = runs[:, 0].astype(np.uint64) + np.uint64(base)
    vectors[:, 1] = runs[:, 1].astype(np.uint64)
    return vectors


def skip(vectors: Iovecs, done: int) -> Iovecs:
    """What is left after `done` bytes (the kernel may take less than asked)."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = vectors[first:].copy()
    if len(rest):
        part = done - int(ends[first] - vectors[first, 1])
        rest[0] += np.array([part, -part], dtype=np.int64).astype(np.uint64)
    return rest


def send(fd: int, vectors: Iovecs) -> int:
    """Bytes taken of the first IOV_MAX ranges. Raises BlockingIOError after SO_SNDTIMEO, OSError otherwise."""
    return _transfer(_libc.sendmsg, fd, vectors, socket.MSG_NOSIGNAL)


def receive(fd: int, vectors: Iovecs) -> int:
    """Bytes received into the first IOV_MAX ranges, all of them unless the stream ends. Raises as `send`."""
    return _transfer(_libc.recvmsg, fd, vectors, socket.MSG_WAITALL)


def _transfer(call: object, fd: int, vectors: Iovecs, flags: int) -> int:
    batch = np.ascontiguousarray(vectors[:IOV_MAX])
    header = _Msghdr(iov=batch.ctypes.data, iovlen=len(batch))
    while True:
        done: int = call(fd, ctypes.byref(header), flags)  # type: ignore[operator]
        if done >= 0:
            return done
        number = ctypes.get_errno()
        if number == errno.EAGAIN:
            raise BlockingIOError(number, os.strerror(number))
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
