"""What a client cannot reach through the proxy: another tenant's prefixes, the transfer, a path that is not listed."""

import json
from typing import Any

import pytest
from proxy_rig import COMPLETION, MODEL, Rig, rig
from yarl import URL

from pdxfer.proxy.app import _FORWARDED

TENANTS = {"api_keys": {"k1": "red", "k2": "red", "k3": "blue"}}
LISTED = {"passthrough": ("/inference/v1/generate", "/v1/listed/*")}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "words " * 300}], "max_tokens": 8}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT} | {
    path: {"model": MODEL, "input": "hi"} for path in (*_FORWARDED, "/inference/v1/generate")
}
KEY = b'"kv_transfer\\u005fparams"'
"""JSON for kv_transfer_params, without these bytes."""


async def sent_by(r: Rig, key: str, path: str, body: Any, kind: str = "application/json") -> tuple[int, bytes]:
    """Status, and the body that the decode engine got last."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
    status, _, _ = await r.post(path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
    return status, r.decode.counts.seen[-1].body if r.decode.counts.seen else b""


@pytest.mark.parametrize("path", BODIES)
async def test_tenants_have_prefixes_of_their_own(path: str) -> None:
    """Two keys, one prompt: the engines see different salts, also of one who sends the other's; a client's own salt
    still tells its parts apart."""
    async with rig(settings=TENANTS | LISTED) as r:

        async def salt(key: str, **more: Any) -> str:
            status, data = await sent_by(r, key, path, BODIES[path] | more)
            assert status == 200
            return str(json.loads(data)["cache_salt"])

        red, also_red, blue = await salt("k1"), await salt("k2"), await salt("k3")
        assert red == also_red != blue
        assert len({red, blue, await salt("k1", cache_salt="a"), await salt("k3", cache_salt="a")}) == 4
        assert await salt("k3", cache_salt=red) not in (red, blue)


async def test_both_legs_have_the_tenant_and_its_salt() -> None:
    async with rig(settings=TENANTS) as r:
        await sent_by(r, "k1", "/v1/completions", COMPLETION)
        legs = [json.loads(side.counts.seen[-1].body) for side in (r.prefill, r.decode)]
        assert legs[0]["cache_salt"] == legs[1]["cache_salt"]
        assert [leg["kv_transfer_params"]["pdxfer"]["tenant"] for leg in legs] == ["red", "red"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=latin-1", "application/x(y)+json"])
@pytest.mark.parametrize(
    ("data", "rest"),
    [
        (b'{%b: {"a": 1}, "x": 2.50}' % KEY, {"x": 2.5}),
        (b'{"vllm_xargs": {%b: "a", "b": 1}}' % KEY, {"vllm_xargs": {"b": 1}}),
        (
            b'{"sampling_params": {"n": 1, "extra_args": {%b: 1}}}' % KEY,
            {"sampling_params": {"n": 1, "extra_args": {}}},
        ),
    ],
    ids=["top", "xargs", "generate"],
)
async def test_no_kv_transfer_params_pass_through(data: bytes, rest: dict[str, Any], kind: str) -> None:
    """However they are written, wherever vLLM reads them."""
    async with rig(settings=LISTED) as r:
        status, sent = await sent_by(r, "", "/inference/v1/generate", data, kind)
        assert (status, json.loads(sent)) == (200, rest)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions"])
async def test_no_kv_transfer_params_among_the_xargs_of_a_known_path(path: str) -> None:
    """One engine alone: there are none of ours, either."""
    async with rig() as r:
        xargs = {"kv_transfer_params": "a", "b": 1}
        _, sent = await sent_by(r, "", path, {"model": MODEL, "prompt": "x", "n": 2, "vllm_xargs": xargs})
        assert json.loads(sent)["vllm_xargs"] == {"b": 1}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])
async def test_json_that_only_an_engine_could_read_is_refused(encoding: str) -> None:
    """Python's json reads them all; so might an engine."""
    async with rig(settings=LISTED) as r:
        data = json.dumps({"kv_transfer_params": {"a": 1}}).encode(encoding)
        assert await sent_by(r, "", "/inference/v1/generate", data) == (400, b"")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{ "x": 2.50, "big": 123456789012345678901234567890 }', "application/json"), (b"[1, 2]", "application/json"),
        (b"", "application/json"), (b'--json\r\n{"kv_transfer_params": 1}', "multipart/form-data; boundary=json"),
    ],
)  # fmt: skip
async def test_what_needs_no_change_passes_through_byte_for_byte(data: bytes, kind: str) -> None:
    async with rig(settings=LISTED) as r:
        assert await sent_by(r, "", "/v1/listed/path", data, kind) == (200, data)


@pytest.mark.parametrize("path", ["/v1/listed/../completions", "/v1/listed/%2e%2E/sleep", "/v1/listed/..%2fsleep"])
async def test_a_listed_star_opens_no_path_beside_it(path: str) -> None:
    """The way to the engine would resolve the dots."""
    async with rig(settings=LISTED) as r:
        async with r.http.post(URL(r.url + path, encoded=True), data=b"x") as response:
            assert response.status == 404
        assert not r.decode.counts.seen
