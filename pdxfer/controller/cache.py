"""The cache verbs over REST: what may be asked, and how an operation becomes an answer.

200 done everywhere    202 runs on, see /v1/operations/{id}    207 done on some workers    502 on none
"""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Header, HTTPException, Query, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from pdxfer.client.operations import Operation
from pdxfer.controller.operations import MAX_KEY, Busy, KeyReused, Operations, Unfit
from pdxfer.controller.tokens import MAX_TOKENS, TokenizeError, find_model, tokenize
from pdxfer.core.errors import UnreachableError
from pdxfer.router.server import RouterServer
from pdxfer.wire.manage import StoreArgs, StoreVerb

_Name = Annotated[str, Field(max_length=128, pattern=r"^[^\x00-\x1f]*$")]
_Wait = Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Wait this long for its end")]
_Key = Annotated[
    str, Header(max_length=MAX_KEY, description="Sent again with the same request, gives the same operation")
]
MAX_TEXT = 4 << 20
_PATH = "Absolute path of a .pdxkv file on the node; {engine} and {rank} are replaced"
VERBS: dict[StoreVerb, str] = {
    "lookup": "Longest stored prefix per node and tier, chunk by chunk: pinned or not, codec, bytes, age, hits.",
    "clear": "Remove values: a prompt's, a tenant's, a tier's, those older than something, or everything.",
    "pin": "Never evict a prompt's values, for a while or until unpinned; survives a restart, bounded by a quota.",
    "unpin": "Let a prompt's values be evicted again.",
    "move": "Move values to another tier, or from another node; the old copy goes when the new one is verified.",
    "copy": "Copy values to another tier, or from another node.",
    "compress": "Store values under a codec, in place; the old copy is visible until the new one is verified.",
    "decompress": "Store compressed values raw again.",
    "prefetch": "Bring a prompt's values to a faster tier before they are needed.",
    "export": "Write a prompt's values to one portable file on the node.",
    "import": "Read such a file into the store.",
    "verify": "Check every checksum; with repair, replace what is broken from another copy, or delete it.",
}
_PROMPT_NEEDED: tuple[StoreVerb, ...] = ("lookup", "pin", "unpin", "prefetch", "export")
_SELECTION_NEEDED: tuple[StoreVerb, ...] = ("clear", "move", "copy", "compress", "decompress", "verify")


_RESPONSES: dict[int | str, dict[str, Any]] = {
    **{code: {"model": Operation} for code in (202, 207, 502)},
    **{code: {} for code in (409, 429, 503)},
}


class CacheRequest(BaseModel):
    """Which values, and what to do with them. A prompt is given as tokens, text, or chat messages."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: _Name = Field(default="", description="A model, for its tokenizer, or a LoRA adapter, for its KV too")
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = Field(default=None, max_length=MAX_TOKENS)
    text: str | None = Field(default=None, max_length=MAX_TEXT)
    messages: list[dict[str, Any]] | None = Field(default=None, max_length=4096)
    salt: _Name = Field(default="", description="cache_salt of the prompt")
    engines: list[_Name] = Field(default=[], max_length=1024, description="Only on these; empty: on all with a store")
    tier: _Name = Field(default="", description="Only this tier; empty: all")
    to_tier: _Name = ""
    from_engine: _Name = Field(
        default="", description="move, copy: take the values out of this engine's tiers, onto the nodes of `engines`"
    )
    tenant: _Name = ""
    everything: bool = Field(default=False, description="clear, verify: all values; never the default")
    older_than_s: float = Field(default=0.0, ge=0, le=1e9)
    codec: _Name = ""
    ttl_s: float = Field(default=0.0, ge=0, le=1e9, description="pin: for so long; 0: until unpinned")
    path: str = Field(default="", max_length=1024, pattern=r"^[^\x00-\x1f]*$", description=_PATH)
    repair: bool = False
    deadline_s: float = Field(default=600.0, gt=0, le=86400)

    @property
    def has_prompt(self) -> bool:
        """Whether it names a prompt."""
        return self.tokens is not None or self.text is not None or self.messages is not None

    def problem(self, verb: StoreVerb) -> str:
        """What is missing or contradicts itself; empty if nothing is."""
        num_prompts = sum(given is not None for given in (self.tokens, self.text, self.messages))
        is_selective = bool(num_prompts or self.tier or self.tenant or self.older_than_s or self.everything)
        if num_prompts > 1:
            return "give the prompt once: as tokens, as text, or as messages"
        if verb in _PROMPT_NEEDED and not num_prompts:
            return f"{verb} needs a prompt: tokens, text or messages"
        if verb in _SELECTION_NEEDED and not is_selective:
            return f"{verb} needs to know which values: a prompt, tier, tenant, older_than_s, or everything"
        if verb in ("move", "copy") and not self.to_tier:
            return f"{verb} needs to_tier"
        if self.from_engine and verb not in ("move", "copy"):
            return f"from_engine goes with move and copy; {verb} works on the engines named in engines"
        if verb in ("move", "compress", "decompress") and not (self.tier or self.from_engine):
            return f"{verb} needs tier: where the values are"
        if verb == "compress" and not self.codec:
            return "compress needs a codec, as `pdxfer codec list` shows them"
        if verb in ("export", "import") and not self.path:
            return f"{verb} needs path: a file on the node"
        return ""

    def args(self, tokens: list[int], adapter: str) -> StoreArgs:
        """As workers read it."""
        return StoreArgs(
            tokens=tokens, salt=self.salt, adapter=adapter, tier=self.tier, to_tier=self.to_tier,
            from_engine=self.from_engine, tenant=self.tenant, everything=self.everything,
            older_than_s=self.older_than_s, codec=self.codec, ttl_s=self.ttl_s, path=self.path, repair=self.repair,
        )  # fmt: skip


def add_cache(app: FastAPI, router: RouterServer, operations: Operations, token: str) -> None:
    """Add the verbs and the operations they become."""

    def start(verb: StoreVerb, request: CacheRequest, key: str) -> Operation:
        """Threads: tokenising and the router may take a moment."""
        if problem := request.problem(verb):
            raise HTTPException(422, problem)
        engines = tuple(dict.fromkeys(request.engines))
        tokens = request.tokens or []
        adapter = ""
        try:
            if request.has_prompt and (request.model or request.tokens is None):
                nodes = [e for e in router.snapshot().engines if not engines or e.engine_id in engines]
                serving, adapter = find_model(nodes, token, request.model)
                if request.tokens is None:
                    tokens = tokenize(serving, token, request.model, request.text, request.messages)
                elif not serving:
                    raise TokenizeError(f"no engine serves {request.model!r}")
            return operations.start(verb, request.args(tokens, adapter), engines, request.deadline_s, key)
        except (TokenizeError, KeyReused) as error:
            raise HTTPException(422, str(error)) from error
        except Unfit as error:
            raise HTTPException(409, str(error)) from error
        except Busy as error:
            raise HTTPException(429, str(error), headers={"Retry-After": "1"}) from error
        except UnreachableError as error:
            raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from error

    async def finished(operation: Operation, wait_s: float) -> Operation:
        """The operation when it is over, or after `wait_s`."""
        over = operations.over(operation.id)
        end = asyncio.get_running_loop().time() + wait_s
        while over is not None and not over.done() and (left := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait([asyncio.wrap_future(over)], timeout=min(left, 1.0))
            await asyncio.to_thread(operations.sweep)
        return await asyncio.to_thread(operations.get, operation.id) or operation

    def add(verb: StoreVerb) -> None:
        async def route(request: CacheRequest, wait_s: _Wait = 10.0, idempotency_key: _Key = "") -> Response:
            operation = await asyncio.to_thread(start, verb, request, idempotency_key)
            return _answer(await finished(operation, wait_s))

        app.post(
            f"/v1/cache/{verb}", description=VERBS[verb], name=f"cache_{verb}", response_model=Operation,
            responses=_RESPONSES,
        )(route)  # fmt: skip

    for verb in VERBS:
        add(verb)

    @app.get("/v1/operations")
    def all_operations() -> list[Operation]:
        """Those that run and the last that ended, newest first."""
        return operations.all()

    @app.get("/v1/operations/{op_id}", response_model=Operation, responses={202: {"model": Operation}, 404: {}})
    async def operation(op_id: str, wait_s: _Wait = 0.0) -> Response:
        """How far it is; with `wait_s`, once it is over (check-finish)."""
        found = await asyncio.to_thread(operations.get, op_id)
        if found is None:
            raise HTTPException(404, _unknown(op_id))
        return _answer(await finished(found, wait_s), failed=200)

    @app.post("/v1/operations/{op_id}/cancel", response_model=Operation, responses={202: {"model": Operation}, 404: {}})
    async def cancel(op_id: str, wait_s: _Wait = 10.0) -> Response:
        """Stop it. What was done by then stays done, and is in the answer."""
        found = await asyncio.to_thread(operations.cancel, op_id)
        if found is None:
            raise HTTPException(404, _unknown(op_id))
        return _answer(await finished(found, wait_s), failed=200)


def _answer(operation: Operation, failed: int = 502) -> JSONResponse:
    status = {"running": 202, "partial": 207, "failed": failed}.get(operation.state, 200)
    headers = {"Location": f"/v1/operations/{operation.id}"} if status == 202 else None
    return JSONResponse(msgspec.to_builtins(operation), status_code=status, headers=headers)


def _unknown(op_id: str) -> str:
    return f"no operation {op_id[:80]!r}; GET /v1/operations lists those that are kept"
