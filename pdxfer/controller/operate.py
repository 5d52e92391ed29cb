"""What operators change while it runs: drain, role, credit, log level, policy. Each answers with the state after it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from pdxfer.core.errors import ConfigError
from pdxfer.core.logs import own_level, set_own_level
from pdxfer.router.events import SetCreditLimit, SetRole, Tell, TellProxy
from pdxfer.router.server import RouterServer
from pdxfer.router.snapshot import EngineView, ProxyView
from pdxfer.wire.manage import SetLogLevel, SetWire
from pdxfer.wire.messages import Role

View = TypeVar("View", EngineView, ProxyView)
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_CONFIRM_S = 3.0
"""A member says its new state with its next heartbeat; one that is silent for longer is said to be."""
_LOOK_S = 0.05


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class NewRole(_Body):
    """What an engine started for both roles does from now on."""

    role: Role


class NewCredit(_Body):
    """Bound on the blocks promised of an engine; null: its own figure alone."""

    limit_blocks: Annotated[int, Field(ge=0, le=1 << 31)] | None


class NewLevel(_Body):
    """Least severe level logged."""

    level: Level


class NewWire(_Body):
    """Codecs on the wire."""

    is_on: bool


class Policy(_Body):
    """Live settings of the router; those that are left out stay as they are."""

    min_remote_tokens: int | None = Field(default=None, ge=0, le=1 << 31)
    max_queue: int | None = Field(default=None, ge=1, le=1 << 20)
    max_wait_s: float | None = Field(default=None, gt=0, le=86400)
    no_engine_wait_s: float | None = Field(default=None, gt=0, le=86400)
    max_bypasses: int | None = Field(default=None, ge=1, le=1 << 20)
    lease_s: float | None = Field(default=None, ge=1, le=86400)
    missed_heartbeats: int | None = Field(default=None, ge=2, le=10000)
    forget_s: float | None = Field(default=None, ge=1, le=1e7)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevel:
    """Of this process."""

    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """All proxies that the router knows."""

    proxies: list[ProxyView]


def add_operate(app: FastAPI, router: RouterServer) -> None:
    """Add the routes."""

    def find(engine_id: str) -> EngineView:
        for engine in router.snapshot().engines:
            if engine.engine_id == engine_id:
                return engine
        raise HTTPException(404, f"no engine {engine_id[:80]!r} has joined; GET /v1/nodes lists those that have")

    @app.post("/v1/nodes/{engine_id}/drain", responses={404: {}})
    def drain(engine_id: str) -> EngineView:
        """No new requests for this engine; running ones finish. Answers with its state afterwards."""
        router.drain(engine_id, True)
        return find(engine_id)

    @app.post("/v1/nodes/{engine_id}/undrain", responses={404: {}})
    def undrain(engine_id: str) -> EngineView:
        """Take new requests again. Answers with its state afterwards."""
        router.drain(engine_id, False)
        return find(engine_id)

    @app.put("/v1/nodes/{engine_id}/role", responses={404: {}, 409: {}})
    def role(engine_id: str, new: NewRole) -> EngineView:
        """Have an engine that was started for both roles do one of them, or both again. Running requests finish."""
        before = find(engine_id)
        if before.started_role != "both":
            raise HTTPException(
                409, f"engine {engine_id} was started as {before.started_role}: only one started with --role both flips"
            )
        router.operate(SetRole(engine_id, new.role))
        return find(engine_id)

    @app.put("/v1/nodes/{engine_id}/credit", responses={404: {}})
    def credit(engine_id: str, new: NewCredit) -> EngineView:
        """Bound what the router promises of this engine's KV blocks; null takes the bound away."""
        find(engine_id)
        router.operate(SetCreditLimit(engine_id, new.limit_blocks))
        return find(engine_id)

    @app.put("/v1/nodes/{engine_id}/log-level", responses={404: {}, 504: {}})
    async def engine_level(engine_id: str, new: NewLevel) -> EngineView:
        """Of an engine's processes; answers once all of its halves have said so."""
        await asyncio.to_thread(find, engine_id)
        router.operate(Tell(engine_id, SetLogLevel(level=new.level), workers_only=False))
        return await _confirmed(engine_id, lambda: find(engine_id), lambda engine: _levels(engine) == {new.level})

    @app.put("/v1/nodes/{engine_id}/wire", responses={404: {}, 409: {}, 504: {}})
    async def wire(engine_id: str, new: NewWire) -> EngineView:
        """Let an engine send codec frames, or everything raw, from its next prompt on; answers once it has said so."""
        before = await asyncio.to_thread(find, engine_id)
        if not all(rank.wire for rank in before.ranks):
            raise HTTPException(409, f"engine {engine_id} has no codecs on the wire: codec.wire was off at its start")
        router.operate(Tell(engine_id, SetWire(is_on=new.is_on)))
        state = "on" if new.is_on else "off"
        return await _confirmed(
            engine_id, lambda: find(engine_id), lambda engine: {rank.wire for rank in engine.ranks} == {state}
        )

    def find_proxy(proxy_id: str) -> ProxyView:
        for proxy in router.snapshot().proxies:
            if proxy.proxy_id == proxy_id:
                return proxy
        raise HTTPException(404, f"no proxy {proxy_id[:80]!r} has joined; GET /v1/proxies lists those that have")

    @app.get("/v1/proxies")
    def proxies() -> Proxies:
        """All proxies that the router knows."""
        return Proxies(proxies=router.snapshot().proxies)

    @app.put("/v1/proxies/{proxy_id}/log-level", responses={404: {}, 504: {}})
    async def proxy_level(proxy_id: str, new: NewLevel) -> ProxyView:
        """Of a proxy's process; answers once it has said so."""
        await asyncio.to_thread(find_proxy, proxy_id)
        router.operate(TellProxy(proxy_id, SetLogLevel(level=new.level)))
        return await _confirmed(proxy_id, lambda: find_proxy(proxy_id), lambda proxy: proxy.log_level == new.level)

    @app.get("/v1/log-level")
    def router_level() -> LogLevel:
        """Of the router's process."""
        return LogLevel(level=own_level())

    @app.put("/v1/log-level")
    def set_router_level(new: NewLevel) -> LogLevel:
        """Of the router's process."""
        set_own_level(new.level)
        return router_level()

    @app.get("/v1/policy")
    def policy() -> dict[str, int | float]:
        """Live settings as they are."""
        return router.snapshot().policy

    @app.patch("/v1/policy")
    def set_policy(new: Policy) -> dict[str, int | float]:
        """Change live settings; not kept across a restart, where the configuration counts."""
        changes = new.model_dump(exclude_none=True)
        try:
            if changes:
                router.set_policy(changes)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from error
        return router.snapshot().policy


async def _confirmed(name: str, look: Callable[[], View], is_so: Callable[[View], bool]) -> View:
    """What `look` shows once the member has confirmed. Raises HTTPException if it does not."""
    end = asyncio.get_running_loop().time() + _CONFIRM_S
    while True:
        view = await asyncio.to_thread(look)
        if is_so(view):
            return view
        if asyncio.get_running_loop().time() >= end:
            raise HTTPException(504, f"{name} did not confirm within {_CONFIRM_S:g} s")
        await asyncio.sleep(_LOOK_S)


def _levels(engine: EngineView) -> set[str]:
    """As its halves reported them."""
    return {engine.log_level, *(rank.log_level for rank in engine.ranks)}
