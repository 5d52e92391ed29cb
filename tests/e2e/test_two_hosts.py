"""docs/two-hosts.md, command by command: two network namespaces, keys and token on."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from pdxfer.bench.texts import Prompts
from pdxfer.launcher.demo_model import demo_model_dir
from tests.e2e.adapter import make_adapter
from tests.e2e.engines import BF16_TOLERANCE, Reply, bf16_difference, post
from tests.e2e.netns import MODEL, A, B, Host, TwoHosts, command, two_hosts
from tests.e2e.test_right import BLOCK_BYTES, LAYERS

pytestmark = pytest.mark.netns

PROXY, CONTROLLER, DECODE = "http://127.0.0.1:8000", f"http://{A}:5580", f"http://{B}:8200"
FLAGS = (
    "--dtype bfloat16 --enforce-eager --max-model-len 4096 --max-num-seqs 4 --max-num-batched-tokens 2048 "
    f"--kv-cache-memory-bytes {512 << 20}"
)
_http = urllib3.PoolManager(retries=False, timeout=5)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    """Steps 1 to 3 are done."""
    with two_hosts(tmp_path / "hosts", demo_model_dir(os.environ)) as both:
        both.configure()
        yield both


def is_ready() -> bool:
    """The proxy says that a pair exists."""
    try:
        return _http.request("GET", f"{PROXY}/ready").status == 200
    except urllib3.exceptions.HTTPError:
        return False


def nodes(token: str) -> urllib3.BaseHTTPResponse:
    return _http.request("GET", f"{CONTROLLER}/v1/nodes", headers={"Authorization": f"Bearer {token}"})


def start_front(hosts: TwoHosts) -> None:
    """Router and proxy on host A; short prompts are paired too."""
    hosts.a.start("router", command("pdxfer launch --role router"), PDXFER_ROUTER__MIN_REMOTE_TOKENS="0")
    hosts.a.start("proxy", command("pdxfer launch --role proxy"))


@pytest.mark.slow
def test_every_part_by_its_own_command(hosts: TwoHosts) -> None:
    """With engines that compute nothing: a pair forms, status and doctor see it, strangers stay out and know why."""
    own = make_own_pair(hosts)
    fake = {"PDXFER_ENGINE__KIND": "fake"}
    start_front(hosts)
    hosts.a.start("prefill", command("pdxfer launch --role prefill"), **fake)
    decode = command("pdxfer launch --role decode")
    hosts.b.start("decode", decode, **fake)
    hosts.b.start("own", f"{decode} --engine-id own --port 8201 --keys {own}", **fake)
    hosts.b.start("stranger", f"{decode} --engine-id stranger --port 8202 --set security.keys_dir=", **fake)
    hosts.wait(is_ready, "pair", 60)
    hosts.wait(lambda: b'"own"' in nodes(hosts.token).data, "engine with a pair of its own", 30)

    assert hosts.a.check(command("pdxfer status")).startswith("ready\n")
    hosts.b.check(command("pdxfer status"))
    checked = hosts.b.run(command("pdxfer doctor")).stdout
    assert "tcp://10.0.0.1:5570 accepts connections" in checked and "between hosts" in checked
    reply = asyncio.run(ask(PROXY, "word " * 400, 4))
    assert (reply.status, reply.mode) == (200, "pair")
    assert asyncio.run(transfer(reply.request_id))["channel"] == "tcp"

    said = f"the router at tcp://{A}:5570 refuses the connection: it wants keys, and we have none"
    hosts.wait(lambda: said in hosts.b.log("stranger"), "word of the refusal", 30)
    assert b"stranger" not in nodes(hosts.token).data
    assert nodes("wrong").status == nodes("").status == 401
    assert asyncio.run(ask(DECODE, "hello", 1, token="wrong")).status == 401
    (hosts.b.home / "wrong").write_text("0" * 48)
    (hosts.b.home / "wrong").chmod(0o600)
    refused = hosts.b.run(command("pdxfer status") + " --token-file wrong")
    assert refused.returncode == 2 and "refused our token" in refused.stderr


def make_own_pair(hosts: TwoHosts) -> Path:
    """As the document says of locking hosts out: a pair of B's own, admitted by its public key at the router."""
    own, shared = hosts.b.home / "own", hosts.b.home / ".pdxfer" / "keys"
    hosts.b.check("pdxfer keys new own")
    for surplus in ("server.key", "server.pub"):
        (own / surplus).unlink()
    hosts.b.check(f"cp -p {shared}/server.pub own/ && cp -p own/client.pub {hosts.a.home}/.pdxfer/keys/b.pub")
    return own


@pytest.mark.vllm
async def test_kv_crosses_the_link_between_real_engines(hosts: TwoHosts, prompts: Prompts, tmp_path: Path) -> None:
    """Prefill by `pdxfer launch`, decode by a plain `vllm serve`: decode answers as it does alone, on KV from A.
    In bfloat16, so within a tolerance. With a LoRA adapter, too.

    The document's channels stay as they are: `local` must find out by itself that it cannot be used. On one machine
    the boot and the pid namespace are the same on both sides, only the network tells them apart.
    """
    cores = sorted(os.sched_getaffinity(0))
    prefill, decode = command("pdxfer launch --role prefill"), command("VLLM_API_KEY=")
    start_front(hosts)
    ports = {"UCX_TCP_PORT_RANGE": "5700-5999"}
    flags = f"{FLAGS} --enable-lora --max-lora-rank 8 --lora-modules tuned={make_adapter(tmp_path / 'adapter')}"
    hosts.a.start("prefill", f"{prefill} -- {flags}", VLLM_CPU_OMP_THREADS_BIND=str(cores[0]), **ports)
    hosts.b.start("decode", f"{decode} {flags}", VLLM_CPU_OMP_THREADS_BIND=str(cores[-1]), **ports)
    await asyncio.to_thread(hosts.wait, is_ready, "pair", 180)
    assert "not local: " in hosts.a.log("prefill")
    data = {*range(5600, 5700), *range(5700, 6000)}
    assert listeners(hosts.a) - data == {5570, 5580, 8100} and listeners(hosts.b) - data == {8200}

    said = []
    for length, model in ((200, MODEL), (600, MODEL), (600, "tuned"), (1500, MODEL)):
        ids, before = prompts.ids(length, 8), hosts.sent_bytes()
        through = await ask(PROXY, ids, 16, model=model, cache_salt=f"through-{length}")
        crossed = hosts.sent_bytes() - before
        alone = await ask(DECODE, ids, 16, token=hosts.token, model=model, cache_salt=f"alone-{length}")
        assert through.status == alone.status == 200, (through.body, alone.body)
        assert through.mode == "pair" and bf16_difference(through, alone) <= BF16_TOLERANCE, (length, model)
        said.append(through.tokens)
        kv_bytes = -(-length // 128) * BLOCK_BYTES // 2 * LAYERS
        assert crossed >= kv_bytes, (length, crossed, kv_bytes)
        moved = await transfer(through.request_id)
        assert moved["channel"] in ("nixl", "tcp") and moved["num_bytes"] == kv_bytes
    assert said[1] != said[2], "the adapter changes nothing"


def listeners(host: Host) -> set[int]:
    """TCP ports that other hosts can reach."""
    rows = [line.split() for line in host.check("cat /proc/net/tcp").splitlines()[1:]]
    return {int(row[1][-4:], 16) for row in rows if row[3] == "0A" and not row[1].startswith("0100007F")}


async def ask(url: str, prompt: list[int] | str, max_tokens: int, token: str = "", **more: object) -> Reply:
    """A greedy completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, **more}
    headers = {"Authorization": f"Bearer {token}"} if token else None
    return await post(url, "/v1/completions", body, headers)


async def transfer(request_id: str) -> dict[str, object]:
    """What moved, once decode has settled it."""
    for _ in range(100):
        answer = await asyncio.to_thread(_http.request, "GET", f"{PROXY}/v1/pdxfer/timeline/{request_id}")
        if found := json.loads(answer.data)["transfer"]:
            return found
        await asyncio.sleep(0.05)
    pytest.fail(f"decode gave no account of {request_id}")
