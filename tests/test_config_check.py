"""What `config check` and `doctor` say of secrets and addresses before anything is started, and the router then."""

import json
import logging
import socket
from pathlib import Path

import pytest

from pdxfer.cli import main, processes
from pdxfer.config import network
from pdxfer.config.load import load
from pdxfer.core.errors import ConfigError
from pdxfer.wire.keys import new_keys

WIDE = "network.bind=10.0.0.1"
ON = "store.enabled=true"


def endpoint_problem(*sets: str) -> str:
    return network.endpoint_problem(load([], sets, {}).config)


def check(capsys: pytest.CaptureFixture[str], *sets: str) -> tuple[int, str]:
    """Exit code and error of `pdxfer config check` with these settings."""
    code = main.run(["config", "check", *(arg for text in sets for arg in ("--set", text))])
    error = capsys.readouterr().err
    assert error.count("\n") == (0 if code == 0 else 1)
    return code, error


def test_secrets_that_a_reachable_address_needs_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As doctor says; on loopback none are needed."""
    assert check(capsys) == (0, "")
    code, error = check(capsys, WIDE)
    assert code == 2 and "keys: none, but 10.0.0.1 is reachable by others; pdxfer keys new DIR" in error
    keys, token = f"security.keys_dir={tmp_path}", f"security.token_file={tmp_path / 'token'}"
    code, error = check(capsys, WIDE, keys, token)
    assert code == 2 and f"cannot read key file {tmp_path}/server.pub" in error
    new_keys(tmp_path)
    code, error = check(capsys, WIDE, keys, token)
    assert code == 2 and error == f"error: token: security.token_file {tmp_path}/token: No such file or directory\n"
    (tmp_path / "token").write_text("x" * 40)
    (tmp_path / "token").chmod(0o600)
    assert check(capsys, WIDE, keys, token) == (0, "")
    (tmp_path / "server.key").unlink()
    assert check(capsys, WIDE, keys, token) == (0, ""), "a member's host has no server.key"
    assert check(capsys, WIDE, "security.allow_insecure=true") == (0, "")


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["transport.channels=tcp,smoke"], "transport.channels names 'smoke'; known are local"),
        ([ON, "store.tiers=[{url: 'redsi://:pw@h'}]"], "unknown scheme 'redsi'; did you mean 'redis'?"),
        ([ON, "store.tiers=[{url: 'dram:', codec: fp9}]"], "store.tiers: no codec 'fp9'; did you mean"),
        ([ON, "store.tiers=[]"], "store.enabled is true, but store.tiers is empty"),
        (["codec.wire=losless"], "section codec: no codec 'losless'; did you mean lossless?"),
        (["codec.wire=auto", "codec.allow=lossless,foo:2"], "section codec: no codec 'foo'"),
        (["codec.wire=auto", "codec.tenants={a: [foo]}"], "section codec: no codec 'foo'"),
    ],
)
def test_a_name_that_nobody_provides_is_refused_before_a_model_is_loaded(
    sets: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By config check, and by launch when it plans."""
    code, error = check(capsys, *sets)
    assert code == 2 and says in error and "pw@" not in error
    args = [arg for text in sets for arg in ("--set", text)]
    assert main.run(["launch", "--role", "prefill", "--config", "cpu-1p1d", "--dry-run", *args]) == 2
    assert says in capsys.readouterr().err


def test_names_that_may_be_are_believed(capsys: pytest.CaptureFixture[str]) -> None:
    """Classes of one's own, levels, other nodes' tiers; and what is switched off is not looked at."""
    tiers = "store.tiers=[{url: 'dram:', codec: 'zstd'}, {url: 'peer:'}, {url: 'my.tiers:Tape', codec: 'my.codecs:C'}]"
    sets = [ON, tiers, "codec.wire=auto", "codec.allow=int8,klt:3", "transport.channels=tcp,my.c:C"]
    assert check(capsys, *sets) == (0, "")
    assert check(capsys, "store.tiers=[{url: 'redsi://h'}]", "codec.allow=foo") == (0, "")


@pytest.mark.parametrize("endpoint", ["10.0.0.1:5570", "tcp://10.0.0.1", "http://10.0.0.1:5570", "tcp://h:port"])
def test_an_endpoint_that_is_no_address_is_refused_by_every_command(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` used to ask this machine instead."""
    wanted = f"error: router.endpoint is '{endpoint}': write it as tcp://HOST:PORT\n"
    assert check(capsys, f"router.endpoint={endpoint}", WIDE) == (2, wanted)
    assert main.run(["status", "--set", f"router.endpoint={endpoint}"]) == 2
    assert capsys.readouterr().err == wanted


def test_a_router_whose_name_is_unknown_does_not_make_this_host_bind_to_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine would advertise an address that nobody else reaches."""

    def unknown(*asked: object, **how: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    config = load([], ["router.endpoint=tcp://no-such-host.invalid:5570"], {}).config
    with pytest.raises(ConfigError, match=r"router\.endpoint names no-such-host\.invalid, which is not known here"):
        network.bind_address(config)
    sets = ["--set", "router.endpoint=tcp://no-such-host.invalid:5570", "--set", "engine.kind=fake"]
    assert main.run(["doctor", "--json", *sets, "--set", "transport.channels=tcp"]) == 1
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["network"]["status"] == "blocks" and found["channel tcp"]["status"] == "ok"


def test_the_way_to_a_router_on_ipv6_is_an_ipv6_address() -> None:
    """Else it would bind to 127.0.0.1 and advertise that."""
    assert network._way_to("::1") == "::1"


@pytest.mark.parametrize(
    ("sets", "is_problem"),
    [
        ([], False),
        (["router.endpoint=tcp://127.0.0.1:5570"], False),
        (["router.endpoint=tcp://localhost:5570", "network.bind=127.0.0.1"], False),
        (["router.endpoint=tcp://127.0.0.1:5570", "network.bind=0.0.0.0"], False),
        (["router.endpoint=tcp://127.0.0.1:6000", "router.port=6000"], False),
        (["router.endpoint=tcp://127.0.0.1:6000"], True),
        (["router.endpoint=tcp://192.0.2.7:5570", "network.bind=0.0.0.0"], True),
        (["router.endpoint=tcp://192.0.2.7:5570", "network.bind=127.0.0.1"], True),
    ],
)
def test_a_router_elsewhere_than_its_endpoint_is_noticed(sets: list[str], is_problem: bool) -> None:
    """Another host's address, or another port."""
    assert bool(endpoint_problem(*sets)) == is_problem


def test_the_router_warns_when_members_would_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a warning: something may forward."""
    from pdxfer.controller import app

    monkeypatch.setattr(app, "serve", lambda router, controller: None)
    with caplog.at_level(logging.WARNING):
        processes.serve_router(load([], ["router.endpoint=tcp://127.0.0.1:6000"], {}).config)
    assert "members go to tcp://127.0.0.1:6000 (router.endpoint), but the router listens on tcp://127.0.0.1:5570" in (
        caplog.text
    )


def test_all_of_loopback_is_loopback_to_every_process() -> None:
    """127.0.0.2 is not reachable from other machines."""
    config = load([], ["network.bind=127.0.0.2"], {}).config
    assert processes.controller_settings(config).host == processes.proxy_settings(config).host == "127.0.0.2"


def test_a_proxy_that_would_be_refused_is_said_before_the_engines_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By launch at once, by doctor as what blocks; engines that may be reached are not a proxy."""
    sets = ["--set", "proxy.bind=0.0.0.0", "--set", "transport.channels=tcp"]
    assert main.run(["launch", "--role", "all", "--config", "fake-1p1d", "--dry-run", *sets]) == 2
    assert "the proxy would listen on 0.0.0.0 (proxy.bind, or network.bind)" in capsys.readouterr().err
    assert main.run(["doctor", "--json", "--config", "fake-1p1d", *sets]) == 1
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["proxy"]["status"] == "blocks"
    sets = ["--set", "network.bind=127.0.0.1", "--set", "transport.channels=tcp"]
    main.run(["doctor", "--json", "--config", "fake-1p1d", *sets])
    assert '"proxy"' not in capsys.readouterr().out
