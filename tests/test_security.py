"""Nothing that runs data as code, no secret in what people may see, and no address of a member to a stranger."""

import ast
import asyncio
import io
import json
import logging
from pathlib import Path

import pytest
from proxy_rig import COMPLETION, rig
from router_kit import SmallEngine, make_hello, make_worker_hello, wait_until

import pdxfer
from pdxfer.config.load import load
from pdxfer.config.show import rows
from pdxfer.controller.settings import ControllerSettings
from pdxfer.core.errors import ConfigError
from pdxfer.core.logs import setup_logging
from pdxfer.proxy.engine_http import refused
from pdxfer.proxy.settings import ProxySettings
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.wire.keys import ClientSecurity, load_client_security, load_server_security, new_keys
from pdxfer.wire.messages import Peers
from pdxfer.wire.sockets import DealerSocket, new_route
from pdxfer.wire.version import encode

PACKAGE = Path(pdxfer.__file__).parent

# ---- data is never run -----------------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "os.system", "os.popen", "torch.load", "numpy.load", "np.load", "subprocess.getoutput",
    "subprocess.getstatusoutput",
}  # fmt: skip
ALLOWED = {"bench/codec_kv.py:np.load": "arrays that the bench itself wrote; objects are refused (allow_pickle is off)"}
"""`file:what` → why it may."""


def dotted(node: ast.expr) -> str:
    """`a.b` of a call to a.b; empty if it is no plain name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden(tree: ast.AST) -> list[str]:
    """What a module does of the things above."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FORBIDDEN_CALLS:
                found.append(name)
            for word in node.keywords:
                is_off = isinstance(word.value, ast.Constant) and word.value.value is False
                if word.arg in ("shell", "allow_pickle") and not is_off:
                    found.append(f"{word.arg}=True")
    return found


@pytest.mark.slow
def test_nothing_in_the_package_runs_data_as_code() -> None:
    """No pickle or marshal, no eval or exec, no loader that builds objects, no shell."""
    files = sorted(PACKAGE.rglob("*.py"))
    found = [f"{f.relative_to(PACKAGE)}:{what}" for f in files for what in forbidden(ast.parse(f.read_text()))]
    assert len(files) > 200
    assert sorted(set(found)) == sorted(ALLOWED), "if one is needed, name it and its reason in ALLOWED"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from marshal import loads", "import os, dill", "eval('1')", "yaml.load(f)", "torch.load(f)",
        "subprocess.run('x', shell=True)", "np.load(f, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_check_sees_what_it_should(text: str) -> None:
    assert forbidden(ast.parse(text))
    assert not forbidden(ast.parse("yaml.safe_load(f)\nmodel.eval()\nrun(x, shell=False)\nre.compile('x')"))


# ---- closed by default -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some-host"])
def test_a_bind_beyond_loopback_without_a_lock_is_refused(host: str) -> None:
    """Each door says which setting is missing."""
    with pytest.raises(ConfigError, match="api_keys"):
        ProxySettings(host=host)
    with pytest.raises(ConfigError, match="token"):
        ControllerSettings(host=host)
    with pytest.raises(ConfigError, match="keys"):
        RouterServer(RouterSettings(bind=f"tcp://{'[::]' if host == '::' else host}:0")).start()


# ---- secrets stay where they are -------------------------------------------------------------------------------------

SECRET = "hunter2hunter2hunter2"
BODY = "the client's own words"


@pytest.mark.parametrize(
    "text",
    [
        "proxy: {api_keys: S}", "proxy: {api_keys: [S]}", "proxy: {api_keys: {S: 5}}",
        "proxy: {api_keys: {S: a, S: b}}", "proxy: {api_keys: {S: a",
        "store: {tiers: 'redis://u:S@h'}", "store: {tiers: [{url: 'redis://u:S@h', nope: 1}]}",
        "store: {tiers: [{url: 'dram:', write: 'redis://u:S@h'}]}",
        "store: {tiers: [{url: 'dram:', write: 's3://b?secret_access_key=S'}]}",
    ],
)  # fmt: skip
def test_a_mistake_beside_a_secret_does_not_print_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text.replace("S", SECRET))
    with pytest.raises(ConfigError) as caught:
        load([file], [], {})
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load([], [f"proxy.api_keys={{{SECRET}"], {})
    assert SECRET not in str(caught.value)


def test_config_show_has_no_secret(tmp_path: Path) -> None:
    """API keys, variables and options by name, and logins and keys inside URLs, nested as deep as they are."""
    file = tmp_path / "c.yaml"
    tiers = [
        {"url": f"redis://u:{SECRET}@h", "options": {"sentinel_password": SECRET, "secret_access_key": SECRET}},
        {"url": f"s3://bucket?region=x&secret_access_key={SECRET}"},
    ]
    settings = {
        "proxy": {"api_keys": {SECRET: "a"}},
        "engine": {"env": {"HF_TOKEN": SECRET}},
        "store": {"tiers": tiers},
    }
    file.write_text(json.dumps(settings))
    loaded = load([file], [], {})
    shown = json.dumps([(row.key, row.value, row.origin) for row in rows(loaded)])
    assert SECRET not in shown
    assert shown.count("***") == 6 and "region=x" in shown


async def test_a_proxy_that_fails_logs_neither_keys_nor_bodies() -> None:
    """At DEBUG no key or token appears anywhere, at INFO no word of a request; nor in what clients are answered."""
    out, engine_key = io.StringIO(), "engine" + SECRET
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    answers: list[str] = []
    try:
        setup_logging("DEBUG", "text", out)
        settings = {"api_keys": {SECRET: "a"}, "engine_api_key": engine_key}
        async with rig(settings=settings, engine={"api_key": engine_key}) as r:
            bodies = [COMPLETION | {"prompt": BODY}, COMPLETION | {"prompt": {"no": BODY}}, f"{{'{BODY}'".encode()]
            for status, key in ((0, SECRET), (500, SECRET), (400, SECRET), (0, SECRET + "x"), (0, "")):
                r.prefill.faults.status = r.decode.faults.status = status
                for body in bodies:
                    _, answer, headers = await r.post("/v1/completions", body, {"Authorization": f"Bearer {key}"})
                    answers += [json.dumps(answer), str(dict(headers))]
            await r.settled()
    finally:
        root.handlers[:], root.level = before
    text = out.getvalue()
    assert "answered 500" in text and "leg of" in text
    assert SECRET not in text and engine_key not in text
    assert not any(SECRET in answer for answer in answers)
    loud = [line for line in text.splitlines() if " DEBUG " not in line]
    assert loud and not any(BODY in line for line in loud)


def test_what_an_engine_says_of_a_bad_request_is_told_to_nobody_else() -> None:
    """vLLM's validation errors quote the request."""
    assert BODY not in str(refused("http://p0/v1/completions", 400, f"bad input: {BODY}".encode()))


# ---- who is told where members are -----------------------------------------------------------------------------------


class Stranger:
    """Says the right things without the right key; keeps what it is sent."""

    def __init__(self, endpoint: str, name: str, security: ClientSecurity | None) -> None:
        self.sockets = {part: DealerSocket(endpoint, new_route(f"{name}/{part}"), security) for part in ("sched", "w0")}
        self.hellos = {"sched": make_hello(name, "decode"), "w0": make_worker_hello(name)}
        self.got: list[bytes] = []

    def talk(self) -> None:
        """One round: send if we can, take what there is."""
        for part, socket in self.sockets.items():
            socket.wait(0.01, to_send=True)
            if socket.can_send:
                socket.send(encode(self.hellos[part]))
            while (data := socket.receive()) is not None:
                self.got.append(data)

    def close(self) -> None:
        for socket in self.sockets.values():
            socket.close()


async def test_addresses_of_channels_go_to_admitted_members_only(tmp_path: Path) -> None:
    """NIXL metadata travels in Peers. With keys, who has none or others is refused at the handshake and sent no byte,
    while members hear of each other."""
    new_keys(tmp_path / "ours")
    new_keys(tmp_path / "theirs")
    theirs = load_client_security(tmp_path / "theirs")
    ours = load_client_security(tmp_path / "ours")
    wrong = ClientSecurity(server_key=ours.server_key, public_key=theirs.public_key, secret_key=theirs.secret_key)
    server = RouterServer(
        RouterSettings(bind="tcp://127.0.0.1:0", heartbeat_s=0.1), load_server_security(tmp_path / "ours")
    )
    server.start()
    strangers = [Stranger(server.endpoint, f"s{n}", security) for n, security in enumerate((None, wrong, theirs))]
    engines = [SmallEngine(server.endpoint, "p0", "prefill", ours), SmallEngine(server.endpoint, "d0", "decode", ours)]

    def everybody_talked() -> bool:
        for stranger in strangers:
            stranger.talk()
        return server.snapshot().is_ready and server.snapshot().refused.get("handshake", 0) >= 6

    try:
        await asyncio.to_thread(wait_until, everybody_talked, 15.0, "members ready and strangers refused")
        nodes = [node for message in engines[0].worker.of(Peers) for node in message.nodes]  # type: ignore[attr-defined]
        assert [(node.engine_id, node.addresses[0].blob) for node in nodes] == [("d0", b"d0")]
        assert {engine.engine_id for engine in server.snapshot().engines} == {"p0", "d0"}
        assert not any(stranger.got for stranger in strangers)
    finally:
        for one in (*strangers, *engines):
            one.close()
        server.close()
