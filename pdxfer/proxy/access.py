"""What a request's headers mean: who the client is, which id it has, and what the engines are sent."""

import hmac
import re
from collections.abc import Mapping

from pdxfer.core.ids import new_request_id
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.settings import ProxySettings

REQUEST_ID = "X-Request-Id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_FORWARDED = ("traceparent", "tracestate", "Accept", "anthropic-version", "anthropic-beta")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-Id if it is 1..128 printable characters, else a fresh one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


def tenant(headers: Mapping[str, str], settings: ProxySettings) -> str:
    """The tenant of the bearer token (or x-api-key); empty without api_keys. Raises ApiError 401."""
    if not settings.api_keys:
        return ""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    found = ""
    known = False
    for key, name in settings.api_keys.items():
        if hmac.compare_digest(key.encode(), token.encode("utf-8", "surrogateescape")):
            found, known = name, True
    if not known:
        raise ApiError(
            401,
            "no valid token: send 'Authorization: Bearer <one of this proxy's api_keys>'",
            code="invalid_api_key",
        )
    return found


def engine_headers(headers: Mapping[str, str], request_id: str, settings: ProxySettings) -> dict[str, str]:
    """Headers of both legs, but for the Content-Type. The client's Authorization goes on only if it is not for us."""
    sent = {name: headers[name] for name in _FORWARDED if name in headers}
    sent[REQUEST_ID] = request_id
    return sent | authorization(headers, settings)


def authorization(headers: Mapping[str, str], settings: ProxySettings) -> dict[str, str]:
    """The engines' API key, or else what an unauthenticated client brought."""
    if settings.engine_api_key:
        return {"Authorization": f"Bearer {settings.engine_api_key}"}
    if not settings.api_keys and "Authorization" in headers:
        return {"Authorization": headers["Authorization"]}
    return {}
