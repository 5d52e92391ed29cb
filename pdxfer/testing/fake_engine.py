"""A vLLM server without vLLM: OpenAI endpoints, deterministic text, configurable speed, injectable faults.

Behind the proxy it stands in for a real engine in tests; with a router it takes part in the whole protocol and moves
real bytes (fake_member.py), which `pdxfer launch --role all --engine fake` uses:
`python -m pdxfer.testing.fake_engine --role prefill --engine-id p0 --port 8100 --router tcp://127.0.0.1:5570`.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from aiohttp import web

from pdxfer.core.ids import new_request_id
from pdxfer.proxy.http_log import HTTP_LOG
from pdxfer.testing import fake_api
from pdxfer.testing.fake_api import BadRequest, Endpoint, Job
from pdxfer.testing.fake_compute import Kv, KvError, Wait

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineSettings:
    """Settings of one fake engine."""

    engine_id: str = "fake"
    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the OS choose."""
    served_names: tuple[str, ...] = ("fake",)
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters by name: where they lie."""
    api_key: str = ""
    max_model_len: int = 1 << 17
    prefill_tokens_per_s: float = float("inf")
    inter_token_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong from now on; tests set these on a running engine."""

    status: int = 0
    """Answer every generation with this status."""
    reset: bool = False
    """Cut the connection instead of answering."""
    hang: bool = False
    """Accept and never answer."""
    break_after: int = -1
    """Cut the connection after this many events of a stream."""
    num_times: int = 1 << 30
    """Requests that it happens to."""

    def take(self) -> bool:
        """Whether it happens to this request."""
        if self.num_times <= 0 or not (self.status or self.reset or self.hang or self.break_after >= 0):
            return False
        self.num_times -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request that reached the engine."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    finished: int = 0
    aborted: int = 0
    running: int = 0
    seen: list[Seen] = field(default_factory=list)


class FakeEngine:
    """`async with FakeEngine(settings) as engine:` serves at `engine.url`."""

    def __init__(self, settings: FakeEngineSettings, kv: Kv | None = None, *, keep_requests: bool = True) -> None:
        self.settings = settings
        self.faults = Faults()
        self.counts = Counts()
        self.url = ""
        self._kv = kv or Wait(settings.prefill_tokens_per_s)
        self._keep_requests = keep_requests
        self._runner: web.AppRunner | None = None

    def __repr__(self) -> str:
        c = self.counts
        return f"<FakeEngine {self.settings.engine_id} {self.url} running={c.running} finished={c.finished}>"

    async def __aenter__(self) -> "FakeEngine":
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", lambda request: self._generate(request, "completions"))
        app.router.add_post("/v1/chat/completions", lambda request: self._generate(request, "chat"))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_route("*", "/{path:.*}", self._echo)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=HTTP_LOG, shutdown_timeout=0.2
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.settings.host, self.settings.port).start()
        self.url = f"http://{self.settings.host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close all connections and the listening socket; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        self.counts.running += 1
        try:
            response = await self._serve(request, endpoint)
            self.counts.finished += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.counts.aborted += 1
            raise
        finally:
            self.counts.running -= 1

    async def _serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        body = await self._note(request)
        is_faulty = self.faults.take()
        if is_faulty and self.faults.hang:
            await asyncio.Event().wait()
        if is_faulty and self.faults.reset:
            _cut(request)
            return web.Response()
        if is_faulty and self.faults.status:
            return _error(self.faults.status, "injected fault")
        try:
            self._authorize(request)
            job = fake_api.parse(
                endpoint, request.headers.get("X-Request-Id") or new_request_id(), body, self.settings.max_model_len
            )
            if job.model and job.model not in (*self.settings.served_names, *self.settings.adapters):
                raise BadRequest(404, f"The model `{job.model}` does not exist.")
        except BadRequest as error:
            return _error(error.status, str(error))
        if job.stream:
            return await self._stream(request, job, self.faults.break_after if is_faulty else -1)
        try:
            async with self._kv.filled(job):
                await asyncio.sleep(self.settings.inter_token_s * job.max_tokens)
        except KvError as error:
            return _error(500, str(error))
        return web.Response(body=fake_api.full(job), content_type="application/json")

    async def _stream(self, request: web.Request, job: Job, break_after: int) -> web.StreamResponse:
        """Headers at once, as vLLM does; then an event a token."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async with self._kv.filled(job):
                for index, event in enumerate(fake_api.events(job)):
                    if index == break_after:
                        _cut(request)
                        return response
                    await asyncio.sleep(self.settings.inter_token_s)
                    await response.write(event)
        except KvError as error:
            await response.write(b"data: " + fake_api.error_body(500, str(error)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._authorize(request)
        except BadRequest as error:
            return _error(error.status, str(error))
        data = [
            {"id": name, "object": "model", "owned_by": "fake", "max_model_len": self.settings.max_model_len}
            for name in self.settings.served_names
        ]
        data += [
            {"id": name, "object": "model", "root": path, "parent": self.settings.served_names[0]}
            for name, path in self.settings.adapters.items()
        ]
        return web.json_response({"object": "list", "data": data})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return await self._echo(request)
        body = await request.read()
        endpoint: Endpoint = "chat" if b'"messages"' in body else "completions"
        try:
            self._authorize(request)
            [tokens] = fake_api.parse(endpoint, "tokenize", body, self.settings.max_model_len).prompts
        except BadRequest as error:
            return _error(error.status, str(error))
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.settings.max_model_len})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _echo(self, request: web.Request) -> web.Response:
        """Any other endpoint: says what it got."""
        body = await self._note(request)
        self.counts.finished += 1
        return web.json_response(
            {"engine": self.settings.engine_id, "path": request.path_qs, "body": body.decode("utf-8", "replace")}
        )

    async def _note(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
        body = await request.read()
        if self._keep_requests:
            headers = {name.lower(): value for name, value in request.headers.items()}
            self.counts.seen.append(Seen(path=request.path, headers=headers, body=body))
        return body

    def _authorize(self, request: web.Request) -> None:
        if self.settings.api_key and request.headers.get("Authorization") != f"Bearer {self.settings.api_key}":
            raise BadRequest(401, "Unauthorized")


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=fake_api.error_body(status, message), content_type="application/json")


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


if __name__ == "__main__":
    from pdxfer.testing.fake_main import main

    main()
