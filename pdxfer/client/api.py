"""The controller's REST API as typed calls: used by the CLI and by tests. Blocking, one request a call, no state."""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from pdxfer.client.model import EngineHealth, RequestTimeline, Summary
from pdxfer.client.operations import Operation
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError, DeadlineError, PdxferError, UnreachableError
from pdxfer.router.server import EventRecord
from pdxfer.router.snapshot import EngineView, ProxyView
from pdxfer.wire.manage import StoreVerb
from pdxfer.wire.messages import Role

T = TypeVar("T")

_OPERATION = (200, 202, 207, 502)
_PROGRESS_S = 0.5
_LONG_WAIT_S = 30.0
_RECONNECT_S = 1.0
_STREAM_SILENCE_S = 45.0
"""The controller says that it is there three times as often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Whether a request could be served by a pair, and what is in the way."""

    ready: bool
    reasons: list[str]


class ControllerClient:
    """One controller."""

    def __init__(self, url: str, token: str = "", timeout_s: float = 5.0) -> None:
        self._url = _checked(url).rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._pause = threading.Event()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __repr__(self) -> str:
        return f"<ControllerClient {self._url}>"

    def ready(self) -> Ready:
        """The router's readiness; not being ready is an answer, not an error."""
        return self._ask("GET", "/ready", Ready, allowed=(200, 503))

    def nodes(self) -> list[EngineView]:
        """All engines the router knows."""
        return self._ask("GET", "/v1/nodes", list[EngineView], field="nodes")

    def events(self, since: int = 0) -> list[EventRecord]:
        """Recent events with a number larger than `since`, oldest first."""
        return self._ask("GET", f"/v1/events?since={since}", list[EventRecord], field="events")

    def summary(self) -> Summary:
        """The cluster on one screen."""
        return self._ask("GET", "/v1/summary", Summary)

    def health(self) -> list[EngineHealth]:
        """Every engine and worker."""
        return self._ask("GET", "/v1/health", list[EngineHealth], field="engines")

    def request(self, request_id: str) -> RequestTimeline:
        """One of the last requests that ended."""
        return self._ask("GET", f"/v1/requests/{quote(request_id, safe='')}", RequestTimeline)

    def follow_events(self, since: int = 0) -> Iterator[EventRecord]:
        """Events after number `since` as they come, without end; a lost connection is made again."""
        last, was_open = since, False
        while True:
            try:
                for event in self._event_stream(last):
                    was_open = True
                    if event is not None:
                        last = event.number
                        yield event
            except UnreachableError:
                if not was_open:
                    raise
            self._pause.wait(_RECONNECT_S)

    # ---- changing --------------------------------------------------------------------------------------------

    def drain(self, engine_id: str) -> EngineView:
        """Give an engine no new requests. Returns its state afterwards."""
        return self._ask("POST", _node(engine_id, "drain"), EngineView)

    def undrain(self, engine_id: str) -> EngineView:
        """Give it new requests again."""
        return self._ask("POST", _node(engine_id, "undrain"), EngineView)

    def set_role(self, engine_id: str, role: Role) -> EngineView:
        """Have an engine started for both roles do this one."""
        return self._ask("PUT", _node(engine_id, "role"), EngineView, body={"role": role})

    def set_credit(self, engine_id: str, limit_blocks: int | None) -> EngineView:
        """Bound what is promised of its blocks; None: no bound."""
        return self._ask("PUT", _node(engine_id, "credit"), EngineView, body={"limit_blocks": limit_blocks})

    def set_wire(self, engine_id: str, is_on: bool) -> EngineView:
        """Let it send codec frames, or everything raw, from its next prompt on."""
        return self._ask("PUT", _node(engine_id, "wire"), EngineView, body={"is_on": is_on})

    def proxies(self) -> list[ProxyView]:
        """All proxies the router knows."""
        return self._ask("GET", "/v1/proxies", list[ProxyView], field="proxies")

    def set_log_level(self, level: str, engine_id: str = "", proxy_id: str = "") -> None:
        """Of an engine's processes, of a proxy's, or of the router's."""
        path = _node(engine_id, "log-level") if engine_id else "/v1/log-level"
        if proxy_id:
            path = f"/v1/proxies/{quote(proxy_id, safe='')}/log-level"
        self._ask("PUT", path, dict[str, Any], body={"level": level})

    def policy(self) -> dict[str, int | float]:
        """The router's live settings."""
        return self._ask("GET", "/v1/policy", dict[str, int | float])

    def set_policy(self, **changes: float) -> dict[str, int | float]:
        """Change live settings. Returns all of them afterwards."""
        return self._ask("PATCH", "/v1/policy", dict[str, int | float], body=changes)

    # ---- operations on the stores ----------------------------------------------------------------------------

    def cache(self, verb: StoreVerb, *, wait_s: float = 10.0, key: str = "", **arguments: Any) -> Operation:
        """Start a verb (`lookup(tokens=...)`, `clear(tier="dram")` ...; the arguments are those of the REST body) and
        wait up to `wait_s` for its end. `key`: repeating the call with it does nothing twice."""
        headers = {"Idempotency-Key": key} if key else {}
        path = f"/v1/cache/{verb}?wait_s={wait_s:g}"
        return self._ask("POST", path, Operation, body=arguments, headers=headers, allowed=_OPERATION, wait_s=wait_s)

    def operations(self) -> list[Operation]:
        """Those that run and the last that ended, newest first."""
        return self._ask("GET", "/v1/operations", list[Operation])

    def operation(self, op_id: str, wait_s: float = 0.0) -> Operation:
        """How far it is; with `wait_s`, once it is over or that time has passed."""
        path = f"/v1/operations/{quote(op_id, safe='')}?wait_s={wait_s:g}"
        return self._ask("GET", path, Operation, allowed=_OPERATION, wait_s=wait_s)

    def finish(self, op_id: str, timeout_s: float, on_progress: Callable[[Operation], None] | None = None) -> Operation:
        """Wait until it is over. Raises DeadlineError if it is not within `timeout_s`; it runs on then."""
        end = SYSTEM_CLOCK.now() + timeout_s
        while True:
            left = end - SYSTEM_CLOCK.now()
            step = min(left, _PROGRESS_S if on_progress else _LONG_WAIT_S)
            operation = self.operation(op_id, max(0.0, step))
            if on_progress:
                on_progress(operation)
            if operation.is_over:
                return operation
            if left <= 0:
                raise DeadlineError(
                    f"operation {op_id} is not over after {timeout_s:g} s ({operation.done} of {operation.total}); it "
                    f"runs on: ask again with `pdxfer cache check-finish {op_id}`"
                )

    def cancel(self, op_id: str) -> Operation:
        """Stop it. Returns what it did until then."""
        path = f"/v1/operations/{quote(op_id, safe='')}/cancel"
        return self._ask("POST", path, Operation, allowed=_OPERATION, wait_s=10.0)

    # ---- inside ----------------------------------------------------------------------------------------------

    def _event_stream(self, since: int) -> Iterator[EventRecord | None]:
        """None once the stream is open, then events until it ends."""
        headers = {**self._headers, "Accept": "text/event-stream", "Last-Event-ID": str(since)}
        request = urllib.request.Request(f"{self._url}/v1/events?since={since}", headers=headers)
        try:
            with self._opener.open(request, timeout=_STREAM_SILENCE_S) as stream:
                if stream.headers.get_content_type() != "text/event-stream":
                    raise PdxferError(f"{request.full_url} is no pdxfer controller of this release: it sends no events")
                yield None
                for line in stream:
                    if line.startswith(b'data: {"number"'):
                        yield msgspec.json.decode(line[6:], type=EventRecord)
        except urllib.error.HTTPError as error:
            raise _refusal(request.full_url, error.code, error.read()) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        field: str = "",
        allowed: tuple[int, ...] = (200,),
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> T:
        """One request. Raises UnreachableError, ConfigError (token), PdxferError (any other refusal)."""
        data = None if body is None else json.dumps(body).encode()
        sent = {**self._headers, **(headers or {}), **({} if data is None else {"Content-Type": "application/json"})}
        request = urllib.request.Request(self._url + path, data=data, method=method, headers=sent)
        try:
            with self._opener.open(request, timeout=self._timeout_s + wait_s) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        if status not in allowed:
            raise _refusal(self._url + path, status, content)
        return _decode(self._url + path, content, kind, field)

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = str(getattr(error, "reason", error)).strip() or type(error).__name__
        return UnreachableError(
            f"the controller at {self._url} does not answer ({reason}); is the router running there? "
            "Set controller.port and network.bind, or give --url"
        )


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is no number
        is_url = None
    if not is_url or " " in url:
        raise ConfigError(f"{url!r} is no address of a controller: write it as http://HOST:PORT")
    return url


def _node(engine_id: str, what: str) -> str:
    return f"/v1/nodes/{quote(engine_id, safe='')}/{what}"


def _decode(url: str, body: bytes, kind: type[T], field: str) -> T:
    try:
        value: Any = msgspec.json.decode(body)
        return msgspec.convert(value[field] if field else value, kind)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise PdxferError(f"{url} is no pdxfer controller of this release: {error}") from error


def _refusal(url: str, status: int, body: bytes) -> PdxferError:
    try:
        detail = str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        detail = body[:200].decode(errors="replace")
    if status == 422:
        return ConfigError(f"{url} does not take this: {detail}")
    if status == 401:
        return ConfigError(f"{url} refused our token: give --token-file, or set security.token_file")
    return PdxferError(f"{url} answered {status}: {detail}")
