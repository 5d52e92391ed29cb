"""The prefill legs of one transfer, one at a time: a new attempt ends the last one.

The leg's answer is read and thrown away; if it fails, the router hears of it, with the attempt's epoch, so that what is
said about an attempt that is over hurts no later one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdxfer.proxy.engine_http import LegError
from pdxfer.wire.messages import EngineRef

log = logging.getLogger(__name__)

Send = Callable[[EngineRef], Awaitable[None]]
"""Runs one prefill leg at that engine to its end. Raises LegError."""
OnFailed = Callable[[int, LegError], None]
"""(epoch, why): the leg of this attempt did not deliver."""


class Attempts:
    """Of one transfer; `close` ends what runs."""

    def __init__(self, transfer_id: str, send: Send, on_failed: OnFailed) -> None:
        self._transfer_id, self._send, self._on_failed = transfer_id, send, on_failed
        self._task: asyncio.Task[None] | None = None
        self.epoch = 0
        """Of the attempt under way."""

    def begin(self, epoch: int, prefill: EngineRef) -> bool:
        """Send the prefill leg to this engine; the last one is cut off. False: an old or repeated word."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run(epoch, prefill), name=f"prefill-{self._transfer_id}-{epoch}")
        return True

    async def close(self) -> None:
        """End the leg under way; no other one begins."""
        self.epoch = 1 << 30
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, epoch: int, prefill: EngineRef) -> None:
        try:
            await self._send(prefill)
        except LegError as error:
            self._on_failed(epoch, error)
        except Exception as error:
            # The router must hear of a bug, too: decode would wait for KV that nobody sends until its deadline.
            log.exception("prefill leg of %s: please report this", self._transfer_id)
            self._on_failed(epoch, LegError("reset", f"bug in the proxy: {type(error).__name__}: {error}"))
