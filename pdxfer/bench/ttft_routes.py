"""How one request goes through each arm: plain, as the proxies of vLLM's NIXL connectors do it, or by our proxy.

pull   client ──▶ prefill (1 token) ──its kv_transfer_params──▶ decode ──▶ stream
push   client ──▶ prefill (1 token) and, at the same moment, decode with prefill's address ──▶ stream
pdxfer client ──▶ proxy ──▶ stream; afterwards the proxy's timeline of it
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pdxfer.bench.ttft_arms import PREFILL_ENGINE_ID, SERVED_NAME, Arm, Ports, Site
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_load import Answer, Client, Moved, completion

OnToken = Callable[[float], None] | None
_PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_TIMELINE_S = 2.0
_TIMELINE_INTERVAL_S = 0.02


class Route(Protocol):
    """One arm's way of serving a prompt."""

    async def stream(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken = None) -> Answer:
        """Greedy tokens of a prompt, streamed."""
        ...


class Plain:
    """One server."""

    def __init__(self, client: Client, url: str) -> None:
        self._client, self._url = client, f"{url}/v1/completions"

    async def stream(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken = None) -> Answer:
        body = completion(SERVED_NAME, prompt, num_tokens)
        return await self._client.stream(self._url, body, _new_id(), on_token=on_token)


class NixlPull:
    """Prefill first; decode then reads the blocks that prefill's answer names."""

    def __init__(self, client: Client, prefill: str, decode: str) -> None:
        self._client = client
        self._prefill, self._decode = f"{prefill}/v1/completions", f"{decode}/v1/completions"

    async def stream(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken = None) -> Answer:
        sent, request_id = time.perf_counter(), _new_id()
        answer, _ = await self._client.post(self._prefill, _prefill_body(prompt), request_id)
        params = answer.get("kv_transfer_params")
        if not params:
            raise BenchError(f"{self._prefill} gave no kv_transfer_params: its KV connector is not at work")
        body = completion(SERVED_NAME, prompt, num_tokens) | {"kv_transfer_params": params}
        return await self._client.stream(self._decode, body, request_id, sent=sent, on_token=on_token)


class NixlPush:
    """Both legs at once; decode tells prefill its blocks, prefill writes them when it has finished."""

    def __init__(self, client: Client, prefill: str, decode: str, side_host: str, side_port: int) -> None:
        self._client = client
        self._prefill, self._decode = f"{prefill}/v1/completions", f"{decode}/v1/completions"
        self._side = (side_host, side_port)

    async def stream(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken = None) -> Answer:
        sent, request_id = time.perf_counter(), _new_id()
        body = completion(SERVED_NAME, prompt, num_tokens) | {"kv_transfer_params": self._params(request_id)}
        prefill = asyncio.create_task(self._client.post(self._prefill, _prefill_body(prompt), request_id))
        stream = self._client.stream(self._decode, body, request_id, sent=sent, on_token=on_token)
        decode = asyncio.create_task(stream)
        try:
            await asyncio.gather(decode, prefill)
        finally:
            prefill.cancel()
            decode.cancel()
        return decode.result()

    def _params(self, request_id: str) -> dict[str, Any]:
        host, port = self._side
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": PREFILL_ENGINE_ID,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_block_ids": [],
        }


class Pdxfer:
    """Our proxy."""

    def __init__(self, client: Client, proxy: str) -> None:
        self._client, self._proxy = client, proxy

    async def stream(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken = None) -> Answer:
        request_id = _new_id()
        body = completion(SERVED_NAME, prompt, num_tokens)
        answer = await self._client.stream(f"{self._proxy}/v1/completions", body, request_id, on_token=on_token)
        return with_timeline(answer, await self._timeline(request_id))

    async def _timeline(self, request_id: str) -> dict[str, Any]:
        """The request's timeline, once what moved is known (it may come after the last token), or at least that it
        landed: decode's account is lost where the end of the request overtakes it."""
        url = f"{self._proxy}/v1/pdxfer/timeline/{request_id}"
        deadline = time.perf_counter() + _TIMELINE_S
        found: dict[str, Any] | None = None
        while time.perf_counter() < deadline:
            found = await self._client.get(url)
            if found and (found["mode"] != "pair" or found["transfer"]):
                return found
            await asyncio.sleep(_TIMELINE_INTERVAL_S)
        if found and "landed" in found["stamps"]:
            return found
        raise BenchError(f"{url} did not say within {_TIMELINE_S:g} s that its KV landed; last answer: {found}")


def with_timeline(answer: Answer, timeline: Mapping[str, Any]) -> Answer:
    """The answer with its stages and what moved. Raises BenchError if a transfer was begun and did not end well."""
    if timeline["mode"] != "pair":
        return replace(answer, stages_ms=timeline["stages_ms"], alone_because=timeline["reason"] or timeline["mode"])
    moved, what = timeline["transfer"], None
    if moved:
        if moved["outcome"] != "delivered":
            raise BenchError(f"request {answer.request_id}: its transfer was {moved['outcome']}: {moved['reason']}")
        what = Moved(num_bytes=moved["num_bytes"], num_units=moved["num_units"], channel=moved["channel"])
    stamps = timeline["stamps"]
    known = "landed" in stamps and "prefilled" in stamps
    landed_after_ms = (stamps["landed"] - stamps["prefilled"]) * 1000 if known else None
    return replace(answer, stages_ms=timeline["stages_ms"], landed_after_ms=landed_after_ms, moved=what)


def require_pair(answer: Answer) -> Answer:
    """The answer, unless pdxfer served it by one engine alone: that would not be what is measured."""
    if answer.alone_because:
        raise BenchError(f"request {answer.request_id} was served by one engine alone: {answer.alone_because}")
    return answer


def route(arm: Arm, client: Client, site: Site, ports: Ports) -> Route:
    """The way through an arm."""
    urls = arm.urls
    kind = arm.name.removesuffix("-stock")
    if kind == "nixl-pull":
        return NixlPull(client, urls["prefill"], urls["decode"])
    if kind == "nixl-push":
        return NixlPush(client, urls["prefill"], urls["decode"], site.prefill_host, ports.prefill_side)
    if kind == "pdxfer":
        return Pdxfer(client, urls["proxy"])
    return Plain(client, urls["prefill"])


def _prefill_body(prompt: Sequence[int]) -> dict[str, Any]:
    return completion(SERVED_NAME, prompt, 1) | {"kv_transfer_params": dict(_PREFILL_PARAMS)}


def _new_id() -> str:
    return uuid.uuid4().hex
