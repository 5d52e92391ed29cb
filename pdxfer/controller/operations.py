"""Operations on the members' stores: started once, tracked part by part, ended by what the workers report.

An operation has one part a worker. A part ends with that worker's last StoreOpUpdate, when its engine is lost, by
cancelling, or by the deadline: never by assumption. Thread-safe; bounded in number running, number kept, and time.
"""

import json
import logging
import secrets
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pdxfer.client.operations import Operation, Part, PartState, State
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import PdxferError
from pdxfer.router.events import Observed, Tell
from pdxfer.router.server import EventRecord, RouterServer
from pdxfer.router.snapshot import EngineView, Snapshot
from pdxfer.wire.manage import StoreArgs, StoreOp, StoreOpCancel, StoreOpUpdate, StoreVerb

log = logging.getLogger(__name__)

MAX_RUNNING = 64
MAX_KEPT = 512
"""Ended ones that can still be asked about; the oldest goes first."""
MAX_KEY = 128
_CANCEL_S = 5.0
"""A cancelled worker has this long to say what it did."""
_LATE_S = 1.0
"""Workers stop by themselves at the deadline; their last word may take this much longer."""


class Busy(PdxferError):
    """Too many operations run."""


class Unfit(PdxferError):
    """The operation cannot be started as asked."""


class KeyReused(PdxferError):
    """The idempotency key belongs to another request."""


@dataclass(slots=True)
class _Part:
    engine_id: str
    incarnation: int
    rank: int
    state: PartState = "running"
    done: int = 0
    total: int = 0
    result: dict[str, Any] | None = None
    error: str = ""


@dataclass(slots=True)
class _Operation:
    id: str
    verb: StoreVerb
    args: StoreArgs
    engines: tuple[str, ...]
    """As asked; empty: all."""
    created: float
    deadline: float
    parts: dict[tuple[str, int], _Part]
    ended: float | None = None
    is_cancelled: bool = False
    over: "Future[None]" = field(default_factory=Future)


class Operations:
    """All operations of one controller."""

    def __init__(self, router: RouterServer, clock: Clock = SYSTEM_CLOCK) -> None:
        self._router, self._clock = router, clock
        self._lock = threading.Lock()
        self._all: OrderedDict[str, _Operation] = OrderedDict()
        self._keys: dict[str, str] = {}
        """Idempotency key → operation id, while that is kept."""
        router.listeners.append(self._on_router)

    def __repr__(self) -> str:
        return f"<Operations running={len(self._running())} kept={len(self._all)}>"

    # ---- asked by the routes ---------------------------------------------------------------------------------

    def start(
        self, verb: StoreVerb, args: StoreArgs, engines: tuple[str, ...], deadline_s: float, key: str = ""
    ) -> Operation:
        """Send it to every worker it concerns. The same key with the same request gives the same operation, however
        often. Raises Unfit, Busy or KeyReused."""
        snapshot = self._router.snapshot()
        with self._lock:
            if known := self._known(key, verb, args, engines):
                return _view(known)
            self._check_ends(snapshot)
            if len(self._running()) >= MAX_RUNNING:
                raise Busy(f"{MAX_RUNNING} operations are running: wait for one of them, or cancel it")
            operation = self._open(verb, args, engines, deadline_s, snapshot)
            if key:
                self._keys[key] = operation.id
            message = StoreOp(op_id=operation.id, verb=verb, args=args, deadline_s=deadline_s)
        for engine_id in {part.engine_id for part in operation.parts.values()}:
            self._router.operate(Tell(engine_id, message))
        return _view(operation)

    def get(self, op_id: str) -> Operation | None:
        """How far it is."""
        self.sweep()
        with self._lock:
            found = self._all.get(op_id)
            return _view(found) if found is not None else None

    def all(self) -> list[Operation]:
        """All that are kept, newest first."""
        self.sweep()
        with self._lock:
            return [_view(operation) for operation in reversed(self._all.values())]

    def cancel(self, op_id: str) -> Operation | None:
        """Ask every worker that has not ended to stop; what they had done by then is in their parts. Idempotent."""
        with self._lock:
            operation = self._all.get(op_id)
            if operation is None:
                return None
            engines = {part.engine_id for part in operation.parts.values() if part.state == "running"}
            if engines and not operation.is_cancelled:
                operation.is_cancelled = True
                operation.deadline = min(operation.deadline, self._clock.now() + _CANCEL_S)
            view = _view(operation)
        for engine_id in engines:
            self._router.operate(Tell(engine_id, StoreOpCancel(op_id=op_id)))
        return view

    def over(self, op_id: str) -> "Future[None] | None":
        """Done when the operation is over."""
        with self._lock:
            found = self._all.get(op_id)
            return found.over if found is not None else None

    def sweep(self) -> None:
        """End parts whose engine is lost or whose deadline has passed."""
        with self._lock:
            if not self._running():
                return
        snapshot = self._router.snapshot()
        with self._lock:
            self._check_ends(snapshot)

    # ---- inside ----------------------------------------------------------------------------------------------

    def _known(self, key: str, verb: StoreVerb, args: StoreArgs, engines: tuple[str, ...]) -> _Operation | None:
        known = self._all.get(self._keys.get(key, "")) if key else None
        if known is not None and (known.verb, known.args, known.engines) != (verb, args, engines):
            raise KeyReused(
                f"Idempotency-Key {key!r} belongs to operation {known.id} ({known.verb}), whose request was another: "
                "use a new key"
            )
        return known

    def _open(
        self, verb: StoreVerb, args: StoreArgs, engines: tuple[str, ...], deadline_s: float, snapshot: Snapshot
    ) -> _Operation:
        now, wall = self._clock.now(), self._clock.wall()
        parts = {
            (engine.engine_id, rank.rank): _Part(engine.engine_id, engine.incarnation, rank.rank)
            for engine in _targets(snapshot.engines, engines, verb, args.from_engine)
            for rank in engine.ranks
        }
        if verb == "export" and len(parts) > 1 and "{engine}" not in args.path and "{rank}" not in args.path:
            raise Unfit(f"{len(parts)} workers would write {args.path}: put {{engine}} and {{rank}} into the path")
        op_id = f"op-{secrets.token_hex(8)}"
        operation = _Operation(op_id, verb, args, engines, wall, now + deadline_s, parts)
        self._all[operation.id] = operation
        while len(self._all) > MAX_KEPT:
            oldest = next((one for one in self._all.values() if one.ended is not None), None)
            if oldest is None:
                break
            del self._all[oldest.id]
            self._keys = {key: op_id for key, op_id in self._keys.items() if op_id != oldest.id}
        return operation

    def _running(self) -> list[_Operation]:
        return [operation for operation in self._all.values() if operation.ended is None]

    def _on_router(self, item: Observed | EventRecord) -> None:
        """The router's thread."""
        if isinstance(item, Observed) and isinstance(item.report, StoreOpUpdate):
            with self._lock:
                self._update(item.engine_id, item.report)

    def _update(self, engine_id: str, update: StoreOpUpdate) -> None:
        operation = self._all.get(update.op_id)
        part = operation.parts.get((engine_id, update.rank)) if operation is not None else None
        if operation is None or part is None or part.state != "running":
            return
        part.done, part.total = max(part.done, update.done), max(part.total, update.total)
        if not update.over:
            return
        part.error = update.error
        part.result, problem = _result(update.result)
        if problem:
            part.error = part.error or problem
        part.state = "done" if not part.error else "cancelled" if operation.is_cancelled else "failed"
        self._settle(operation)

    def _check_ends(self, snapshot: Snapshot) -> None:
        now = self._clock.now()
        engines = {engine.engine_id: engine for engine in snapshot.engines}
        for operation in self._running():
            for part in operation.parts.values():
                if part.state != "running":
                    continue
                engine = engines.get(part.engine_id)
                if engine is None or engine.incarnation != part.incarnation:
                    part.state, part.error = "lost", f"engine {part.engine_id} left while it was at it"
                elif engine.state == "suspect":
                    part.state, part.error = "lost", f"engine {part.engine_id} fell silent while it was at it"
                elif now > operation.deadline + _LATE_S:
                    part.state = "cancelled" if operation.is_cancelled else "expired"
                    part.error = "its last word did not come by the deadline"
            self._settle(operation)

    def _settle(self, operation: _Operation) -> None:
        if operation.ended is None and all(part.state != "running" for part in operation.parts.values()):
            operation.ended = self._clock.wall()
            operation.over.set_result(None)
            log.info("%s %s: %s", operation.verb, operation.id, _state(operation))


def _targets(engines: list[EngineView], named: tuple[str, ...], verb: StoreVerb, from_engine: str) -> list[EngineView]:
    """The engines that are meant: those that take, where values come from another one. Raises Unfit if one cannot be
    asked."""
    usable = {engine.engine_id: engine for engine in engines if engine.state in ("ready", "draining")}
    missing = [engine_id for engine_id in named if engine_id not in usable]
    if missing:
        raise Unfit(f"no engine {', '.join(missing)} can be asked now; there are: {', '.join(usable) or 'none'}")
    if from_engine and from_engine not in usable:
        raise Unfit(f"no engine {from_engine} to take values from; there are: {', '.join(usable) or 'none'}")
    if from_engine in named:
        raise Unfit(f"engine {from_engine} cannot take values from itself: name others in engines")
    if from_engine and verb == "move" and len(named) != 1:
        raise Unfit("a move between nodes goes to one: name it in engines (copy can go to several)")
    found = [usable[engine_id] for engine_id in named] if named else list(usable.values())
    found = [engine for engine in found if engine.engine_id != from_engine]
    with_store = [engine for engine in found if any(rank.tiers for rank in engine.ranks)]
    if not with_store:
        raise Unfit(
            "no engine that is meant has a store: start the engines with store.enabled (pdxfer launch --set "
            "store.enabled=true)"
        )
    return sorted(with_store, key=lambda engine: engine.engine_id)


def _result(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """The worker's JSON object, or what is wrong with it."""
    if not data:
        return None, ""
    try:
        result = json.loads(data)
    except (ValueError, RecursionError) as error:
        return None, f"its result is no JSON: {error}"
    return (result, "") if isinstance(result, dict) else (None, "its result is no JSON object")


def _state(operation: _Operation) -> State:
    if operation.ended is None:
        return "running"
    states = {part.state for part in operation.parts.values()}
    if states <= {"done"}:
        return "done"
    if operation.is_cancelled:
        return "cancelled"
    return "partial" if "done" in states else "failed"


def _view(operation: _Operation) -> Operation:
    parts = [
        Part(
            engine_id=part.engine_id, rank=part.rank, state=part.state, done=part.done, total=part.total,
            result=part.result, error=part.error,
        )
        for part in operation.parts.values()
    ]  # fmt: skip
    return Operation(
        id=operation.id,
        verb=operation.verb,
        state=_state(operation),
        done=sum(part.done for part in parts),
        total=sum(part.total for part in parts),
        created=operation.created,
        ended=operation.ended,
        parts=parts,
    )
