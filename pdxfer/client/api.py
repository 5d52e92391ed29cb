"""The controller's REST API as typed calls: used by the CLI and by tests. Blocking, one request a call, no state."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from pdxfer.core.errors import ConfigError, PdxferError, UnreachableError
from pdxfer.router.server import EventRecord
from pdxfer.router.snapshot import EngineView

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Whether a request could be served by a pair, and what is in the way."""

    ready: bool
    reasons: list[str]


class ControllerClient:
    """One controller."""

    def __init__(self, url: str, token: str = "", timeout_s: float = 5.0) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
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

    def drain(self, engine_id: str) -> EngineView:
        """Give an engine no new requests. Returns its state afterwards."""
        return self._ask("POST", f"/v1/nodes/{quote(engine_id, safe='')}/drain", EngineView)

    def undrain(self, engine_id: str) -> EngineView:
        """Give it new requests again."""
        return self._ask("POST", f"/v1/nodes/{quote(engine_id, safe='')}/undrain", EngineView)

    def _ask(self, method: str, path: str, kind: type[T], field: str = "", allowed: tuple[int, ...] = (200,)) -> T:
        """One request. Raises UnreachableError, ConfigError (token), PdxferError (any other refusal)."""
        request = urllib.request.Request(self._url + path, method=method, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(
                f"the controller at {self._url} does not answer ({reason}); is the router running there? "
                "Set controller.port and network.bind, or give --url"
            ) from error
        if status not in allowed:
            raise _refusal(self._url + path, status, body)
        return _decode(self._url + path, body, kind, field)


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
    if status == 401:
        return ConfigError(f"{url} refused our token: give --token-file, or set security.token_file")
    return PdxferError(f"{url} answered {status}: {detail}")
