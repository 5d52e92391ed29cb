"""Which decode engines this proxy has met, and which models they serve.

Engines are learnt from the router's answers. They are the last resort when the router is unreachable, and the source
of /v1/models. Event-loop thread only.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping

from pdxfer.core.clock import Clock
from pdxfer.core.errors import UnreachableError
from pdxfer.core.ids import new_request_id
from pdxfer.proxy.body import JsonObject
from pdxfer.proxy.engine_http import EngineHttp, LegError
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.pairer import Pairer
from pdxfer.wire.messages import EngineRef, Local, Pair, Pairing

log = logging.getLogger(__name__)

MAX_ENGINES = 64
"""Engines remembered; the least recently used one is forgotten."""
FORGET_S = 60.0
"""An engine that has not answered for this long no longer counts for the list of models."""
MAX_UNKNOWN = 256
"""Unknown model names remembered for one models_ttl_s, so that they cost no look-up each."""


class Engines:
    """The decode engines seen so far, most recently used last."""

    def __init__(
        self,
        *,
        http: EngineHttp,
        pairer: Pairer,
        clock: Clock,
        headers: Mapping[str, str],
        aliases: Mapping[str, str],
        ttl_s: float,
        timeout_s: float,
    ) -> None:
        self._http, self._pairer, self._clock = http, pairer, clock
        self._headers, self._aliases = headers, aliases
        self._ttl_s, self._timeout_s = ttl_s, timeout_s
        self._seen: OrderedDict[str, EngineRef] = OrderedDict()
        self._models: dict[str, list[JsonObject]] = {}
        self._answered: dict[str, float] = {}
        self._fetched = float("-inf")
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        """Under way, by model: whoever asks meanwhile shares the answer."""
        self._num_fetches = 0
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Engines {' '.join(self._seen)} models={sorted(self._names())}>"

    def close(self) -> None:
        """Ask nobody any more."""
        for refresh in self._refreshes.values():
            refresh.cancel()

    def resolve(self, model: str) -> str:
        """The name that engines serve for what a client asked."""
        return self._aliases.get(model, model)

    def base(self, model: str) -> str:
        """What the router knows it by: an adapter's model. Engines load adapters without telling the router."""
        parent = self._union().get(model, {}).get("parent")
        return parent if isinstance(parent, str) and parent else model

    def lacking(self, model: str) -> list[str]:
        """Engines known not to serve this adapter; of other names the router knows that itself."""
        if self.base(model) == model:
            return []
        return [engine_id for engine_id, models in self._models.items() if model not in _ids(models)]

    def remember(self, engine: EngineRef) -> None:
        """The router sent us to this decode engine."""
        self._seen[engine.engine_id] = engine
        self._seen.move_to_end(engine.engine_id)
        while len(self._seen) > MAX_ENGINES:
            self._forget(next(iter(self._seen)))

    def last_resort(self, model: str, avoid: Collection[str] = ()) -> EngineRef | None:
        """The engine used last that may serve `model` and is not one to `avoid`, if there is one. Each call moves on to
        another one."""
        seen = list(self._seen.values())
        serving = [e for e in seen if not model or model in _ids(self._models.get(e.engine_id, [{"id": model}]))]
        well = [e for e in serving if e.engine_id not in avoid]
        engine = next(reversed(well or serving or seen), None)
        if engine is not None:
            self._seen.move_to_end(engine.engine_id, last=False)
        return engine

    async def models(self) -> list[JsonObject]:
        """Entries for /v1/models: union over engines by id, then aliases. Raises ApiError 503 when none is known."""
        await self._refresh(model="")
        entries = self._union()
        if not entries:
            raise ApiError(503, "no decode engine has joined yet; see GET /ready", code="no_engine", retry_after_s=2)
        for alias, name in self._aliases.items():
            if name in entries:
                entries[alias] = entries[name] | {"id": alias, "root": name}
        return list(entries.values())

    async def check(self, model: str) -> None:
        """Raise ApiError 404 if no engine serves `model`. With no engine known, let the request go on and see."""
        if not model or model in self._names():
            return
        known_until = self._unknown.get(model, float("-inf"))
        if self._clock.now() >= known_until:
            await self._refresh(model)
        names = self._names()
        if not names or model in names:
            return
        self._unknown[model] = self._clock.now() + self._ttl_s
        while len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)
        served = ", ".join(sorted(names | self._aliases.keys()))
        raise ApiError(
            404, f"the model {model!r} does not exist; served are: {served}", code="model_not_found", param="model"
        )

    async def _refresh(self, model: str) -> None:
        """Fetch all known engines' lists, and ask the router for an engine that serves `model` if they lack it."""
        if not model and self._clock.now() < self._fetched + self._ttl_s:
            return
        refresh = self._refreshes.get(model)
        if refresh is None:
            refresh = self._refreshes[model] = asyncio.create_task(self._look_up(model), name="models")
            refresh.add_done_callback(lambda _: self._refreshes.pop(model))
        await asyncio.shield(refresh)

    async def _look_up(self, model: str) -> None:
        """The router does not know adapters and would make us wait for one: first those look who are known."""
        if model and self._seen:
            await self._fetch_all()
            if model in self._names():
                return
        await self._meet(model)
        if model and not self._seen:
            await self._meet("")
        await self._fetch_all()

    async def _fetch_all(self) -> None:
        num_begun = self._num_fetches
        async with self._lock:
            if self._num_fetches > num_begun:
                return  # one began after we met our engine, and is over
            self._num_fetches += 1
            await asyncio.gather(*(self._fetch(engine) for engine in list(self._seen.values())))
            self._fetched = self._clock.now()

    async def _meet(self, model: str) -> None:
        """Learn of a decode engine from the router, if it answers."""
        request = Pair(request_id=new_request_id(), num_tokens=1, deadline_s=1.0, model=model, local_only=True)
        try:
            answer = await self._pairer.pair(request, self._timeout_s)
        except UnreachableError as error:
            log.debug("no new engines: %s", error)
            return
        if isinstance(answer, Local | Pairing):
            self.remember(answer.decode)

    async def _fetch(self, engine: EngineRef) -> None:
        """Update one engine's list; keep the old one if it does not answer."""
        try:
            models = await self._http.get_models(engine.url, self._headers, self._timeout_s)
        except LegError as error:
            log.warning("cannot list the models of %s: %s", engine.engine_id, error)
            if self._clock.now() > self._answered.get(engine.engine_id, float("-inf")) + FORGET_S:
                self._forget(engine.engine_id)
            return
        if engine.engine_id in self._seen:
            self._models[engine.engine_id] = models
            self._answered[engine.engine_id] = self._clock.now()

    def _forget(self, engine_id: str) -> None:
        for table in (self._seen, self._models, self._answered):
            table.pop(engine_id, None)

    def _union(self) -> dict[str, JsonObject]:
        entries: dict[str, JsonObject] = {}
        for models in self._models.values():
            for entry in models:
                if isinstance(entry.get("id"), str):
                    entries.setdefault(str(entry["id"]), entry)
        return entries

    def _names(self) -> set[str]:
        return set(self._union())


def _ids(models: list[JsonObject]) -> set[object]:
    return {entry.get("id") for entry in models}
