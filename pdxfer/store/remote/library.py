"""What tiers share that talk through a vendor's client library: addresses of buffers, and one writer a key.

Such libraries promise no deadlines, so their tiers copy values before they hand them over (RemoteTier.overruns).
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def address_of(view: memoryview) -> int:
    """Where a writable, contiguous buffer lies; it must outlive the use of the number."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class KeyLocks:
    """One thread a key at a time. For servers that cannot write "only if absent"; other processes are not kept out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[bytes] = set()

    @contextmanager
    def held(self, key: bytes, timeout_s: float) -> Iterator[bool]:
        """Whether the key is ours for the block; False: not within `timeout_s`."""
        with self._changed:
            got = self._changed.wait_for(lambda: key not in self._held, timeout_s)
            if got:
                self._held.add(key)
        try:
            yield got
        finally:
            if got:
                with self._changed:
                    self._held.discard(key)
                    self._changed.notify_all()
