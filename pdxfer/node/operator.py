"""Runs the controller's store operations on this rank, on the store's own loop, and reports how far they are.

Bounded in number and time. An operation that comes twice runs once; one without a store is answered at once. Whatever
a handler raises is its last word to the controller, never an exception here.
"""

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import PdxferError
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.wire.manage import StoreOp, StoreOpUpdate

log = logging.getLogger(__name__)

MAX_RUNNING = 16
MAX_REMEMBERED = 1024
MAX_RESULT_BYTES = 1 << 20
PROGRESS_S = 0.25
"""Least time between two reports of one operation."""
_MAX_ERROR = 1000

Progress = Callable[[int, int], None]
"""done, total: as often as one likes; store's loop."""
Handler = Callable[[TieredStore, StoreOp, Progress], Awaitable[object]]
"""Does one operation and returns what it found or changed: a value that msgspec can turn into a JSON object. Cancelled
at the deadline and when an operator cancels; what it raises is told."""


class Operator:
    """The operations of one rank. `start` and `cancel` from any thread, never blocking."""

    def __init__(
        self, rank: int, thread: StoreThread, handler: Handler, send: Callable[[StoreOpUpdate], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._rank, self._thread, self._handler, self._send, self._clock = rank, thread, handler, send, clock
        self._lock = threading.Lock()
        self._running: dict[str, asyncio.Task[None] | None] = {}
        """None: its first step is still to come."""
        self._cancelled: set[str] = set()
        self._ended: OrderedDict[str, StoreOpUpdate] = OrderedDict()
        """Last words, for an operation that is asked for again."""

    def __repr__(self) -> str:
        return f"<Operator rank={self._rank} running={len(self._running)}>"

    def start(self, op: StoreOp) -> None:
        """Begin it, unless it runs or ran already."""
        with self._lock:
            if op.op_id in self._running:
                return
            known = self._ended.get(op.op_id)
            is_full = len(self._running) >= MAX_RUNNING
            if known is None and not is_full:
                self._running[op.op_id] = None
                self._thread.submit(lambda store: self._run(store, op))
                return
        if known is not None:
            self._send(known)
        else:
            self._send(self._last(op, _Told(), error=f"{MAX_RUNNING} operations are running on this rank already"))

    def cancel(self, op_id: str) -> None:
        """Stop it; its last word follows. Unknown ones are left alone."""
        self._thread.call_soon(lambda store: self._cancel(op_id))

    # ---- the store's loop ------------------------------------------------------------------------------------

    def _cancel(self, op_id: str) -> None:
        with self._lock:
            task = self._running.get(op_id)
            if op_id in self._running and task is None:
                self._cancelled.add(op_id)  # its first step is still to come
        if task is not None:
            task.cancel()

    async def _run(self, store: TieredStore, op: StoreOp) -> None:
        """One operation from start to last word, also when it is cancelled."""
        told = _Told()
        next_report = self._clock.now() + PROGRESS_S

        def progress(done: int, total: int) -> None:
            nonlocal next_report
            told.done, told.total = done, total
            if self._clock.now() >= next_report:
                next_report = self._clock.now() + PROGRESS_S
                self._send(StoreOpUpdate(op_id=op.op_id, rank=self._rank, done=done, total=total))

        with self._lock:
            self._running[op.op_id] = asyncio.current_task()
            is_cancelled = op.op_id in self._cancelled
            self._cancelled.discard(op.op_id)
        try:
            if is_cancelled:
                raise asyncio.CancelledError
            async with asyncio.timeout(op.deadline_s):
                result = await self._handler(store, op, progress)
            last = self._last(op, told, result)
        except TimeoutError:
            last = self._last(op, told, error=f"not done within {op.deadline_s:g} s")
        except asyncio.CancelledError:
            last = self._last(op, told, error="cancelled")
        except PdxferError as error:
            last = self._last(op, told, error=str(error))
        except Exception as error:
            log.exception("%s %s failed: please report this", op.verb, op.op_id)
            last = self._last(op, told, error=f"{type(error).__name__}: {error}")
        self._end(op, last)

    def _end(self, op: StoreOp, last: StoreOpUpdate) -> None:
        with self._lock:
            self._running.pop(op.op_id, None)
            self._ended[op.op_id] = last
            if len(self._ended) > MAX_REMEMBERED:
                self._ended.popitem(last=False)
        self._send(last)

    def _last(self, op: StoreOp, told: "_Told", result: object = None, error: str = "") -> StoreOpUpdate:
        data = b"" if result is None else json.dumps(_plain(result)).encode()
        if len(data) > MAX_RESULT_BYTES:
            error = error or f"the result has {len(data)} bytes, {MAX_RESULT_BYTES} are allowed: ask for less at once"
            data = b""
        return StoreOpUpdate(
            op_id=op.op_id, rank=self._rank, done=told.done, total=told.total, over=True, result=data,
            error=error[:_MAX_ERROR],
        )  # fmt: skip


@dataclass(slots=True)
class _Told:
    """How far an operation is."""

    done: int = 0
    total: int = 0


def _plain(result: object) -> Any:
    """As JSON has it; chunk keys in hex."""
    return _hexed(msgspec.to_builtins(result, builtin_types=(bytes,)))


def _hexed(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {_hexed(key): _hexed(one) for key, one in value.items()}
    return [_hexed(one) for one in value] if isinstance(value, list | tuple) else value
