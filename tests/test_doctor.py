"""Doctor: each problem is found and comes with what to do; what is fine is said."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdxfer.cli import main
from pdxfer.cli.checks import access, channels, machine, model, software
from pdxfer.cli.checks import all as everything
from pdxfer.cli.checks.finding import Finding
from pdxfer.config.load import load
from pdxfer.config.schema import Config
from pdxfer.launcher.engine import Inputs
from pdxfer.launcher.machine import Machine
from pdxfer.launcher.plan import plan_all


def config(*sets: str) -> Config:
    return load(["cpu-1p1d"], sets, {}).config


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def write_model(folder: Path, data_bytes: int = 8) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "config.json").write_text('{"architectures": ["TinyModel"]}')
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))


def check_model(folder: Path) -> Finding:
    return model.check_model(config(f"model.path={folder}"), Path("/nowhere"))[0][0]


def test_every_problem_says_what_to_do_and_blocks_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, as JSON, for a configuration that cannot run."""
    sets = ["--set", "engine.kind=fake", "--set", "transport.channels=tcp", "--set", "network.bind=0.0.0.0"]
    assert main.run(["doctor", "--json", *sets]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"] is False
    assert found["keys"]["status"] == found["token"]["status"] == "blocks"
    assert found["channel tcp"]["status"] == "ok"
    assert all(finding["fix"] for finding in report["findings"] if finding["status"] != "ok")


def test_a_whole_model_is_read_and_a_cut_one_blocks(tmp_path: Path) -> None:
    """The header of each weights file says how long it must be."""
    write_model(tmp_path)
    assert (check_model(tmp_path).status, "TinyModel" in check_model(tmp_path).text) == ("ok", True)
    write_model(tmp_path, data_bytes=3)
    assert check_model(tmp_path).status == "blocks" and "its header says" in check_model(tmp_path).text


def test_a_model_with_a_missing_shard_blocks(tmp_path: Path) -> None:
    """Named by its index."""
    write_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert "a.safetensors of its index is missing" in check_model(tmp_path).text


def test_a_missing_model_blocks_and_an_unprepared_demo_does_not(tmp_path: Path) -> None:
    """launch prepares the demo model by itself."""
    assert check_model(Path("/nowhere/m")).status == "blocks"
    found = model.check_model(config(), tmp_path)[0][0]
    assert (found.status, "not prepared yet" in found.text) == ("ok", True)


@pytest.mark.parametrize(
    ("requirements", "wanted"),
    [(["numpy", "torch==2.13.0", "x"], "2.13.0"), (["torch (==2.9.1)"], "2.9.1"), (["torch>=2"], ""), ([], "")],
)
def test_torchvision_names_the_torch_it_was_made_for(requirements: list[str], wanted: str) -> None:
    """Another torch breaks `import vllm`."""
    assert software.wanted_torch(requirements) == wanted


def test_the_choice_is_the_first_kind_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it says which were skipped."""
    monkeypatch.setattr(channels, "_try", lambda kind: {"nixl": "import: no"}.get(kind, ""))
    found = by_name(channels.check_channels(config("transport.channels=nixl,local,tcp"), {}))
    assert found["channel nixl"].status == "warning" and "[nixl]'; or leave `nixl` out" in found["channel nixl"].fix
    assert found["channel choice"].text == "on one host local, between hosts tcp (nixl is not available)"


@pytest.mark.parametrize(
    ("wire", "devices", "chosen"),
    [("auto", [], "tcp"), ("auto", ["mlx5_0"], "nixl"), ("off", [], "nixl"), ("int8", [], "tcp")],
)
def test_codecs_on_the_wire_put_tcp_before_nixl_where_there_is_no_rdma(
    monkeypatch: pytest.MonkeyPatch, wire: str, devices: list[str], chosen: str
) -> None:
    """And doctor says why."""
    monkeypatch.setattr(channels, "_try", lambda kind: "")
    monkeypatch.setattr(channels, "rdma_devices", lambda: devices)
    text = by_name(channels.check_channels(config(f"codec.wire={wire}"), {}))["channel choice"].text
    assert text.startswith(f"on one host local, between hosts {chosen} (")
    assert ("codec.wire is on" in text) is (chosen == "tcp")


@pytest.mark.parametrize(("kind", "is_told"), [("vllm", True), ("fake", False)])
def test_kv_in_gpu_memory_is_said_to_be_untried(monkeypatch: pytest.MonkeyPatch, kind: str, is_told: bool) -> None:
    """Nothing of it ran on hardware."""
    monkeypatch.setattr(channels, "_try", lambda kind: "")
    found = by_name(everything.run_checks(config(f"engine.kind={kind}"), Machine(cpus=(0, 1), gpus=(0, 1)), {}))
    assert ("gpu memory" in found) is is_told


def test_no_working_kind_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There would be no way for KV."""
    monkeypatch.setattr(channels, "_try", lambda kind: "broken")
    assert by_name(channels.check_channels(config(), {}))["channel choice"].status == "blocks"


def test_an_unknown_kind_is_a_warning() -> None:
    """With the known ones in its text."""
    found = by_name(channels.check_channels(config("transport.channels=tcp,smoke"), {}))
    assert "known are" in found["channel smoke"].text


def test_ucx_tls_is_pointed_out() -> None:
    """It overrides what makes push safe."""
    found = by_name(channels.check_channels(config("transport.channels=tcp"), {"UCX_TLS": "all"}))["ucx"]
    assert found.status == "warning" and "UCX_TLS=all" in found.text


def test_cma_is_tried_for_real() -> None:
    """Either it works here, or the reason is the kernel's."""
    reason = channels.try_cma()
    assert reason == "" or "cannot read memory" in reason


def test_a_taken_port_and_too_little_memory_are_found() -> None:
    """Ports of the plan; memory of weights, KV and engines."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = config(f"router.port={taken.getsockname()[1]}", "engine.kv_cache_gib=100000")
        specs = plan_all(Inputs(config=settings, config_file="", machine=Machine(cpus=(0, 1))))
        found = by_name(machine.check_machine(settings, specs, 2, 1 << 30))
    assert found["ports"].status == "blocks" and "router.port" in found["ports"].text
    assert found["memory"].status == "warning"


def test_too_few_descriptors_for_the_requests_in_flight_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the hard limit: launch raises the soft one."""
    settings = config("proxy.max_in_flight=1000")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (512, 4096))
    assert by_name(machine.check_machine(settings, [], 0, 0))["descriptors"].status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (512, 1024))
    found = by_name(machine.check_machine(settings, [], 0, 0))["descriptors"]
    assert found.status == "warning" and "1024" in found.text and "proxy.max_in_flight" in found.fix


HOLDER = """
import socket, sys
tcp = socket.create_server(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1])
unix.listen()
print(tcp.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        (["-m", "pdxfer.cli.main", "launch"], True),
        (["--kv-transfer-config", '{"kv_connector":"PdxferConnector"}'], True),
        (["--directory", "/home/me/pdxfer"], False),
    ],
)
def test_ports_of_our_own_cluster_are_said_to_be_ours(tmp_path: Path, words: list[str], is_ours: bool) -> None:
    """Also the socket of the host's store; a clone named pdxfer makes no process ours."""
    socket_path = tmp_path / "s"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(socket_path), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdin and holder.stdout
    with holder, holder.stdin:
        port = int(holder.stdout.readline())
        shared = ["store.enabled=true", f"store.shared_memory={socket_path}"]
        settings = config("engine.kind=fake", "model.path=m", f"router.port={port}", *shared)
        specs = plan_all(Inputs(config=settings, config_file="", machine=Machine(cpus=(0, 1))))
        found = [f for f in machine.check_machine(settings, specs, 2, 1 << 30) if f.name == "ports"]
    if not is_ours:
        assert [f.status for f in found] == ["blocks", "blocks"]
        return
    assert [f.status for f in found] == ["warning"] and "doctor --live" in found[0].fix
    text = f"a pdxfer that runs here already holds those of router (pid {holder.pid}), store (pid {holder.pid})"
    assert found[0].text == text


def test_keys_and_token_are_needed_beyond_loopback_only(tmp_path: Path) -> None:
    """Files must be readable by their owner alone."""
    assert {f.status for f in access.check_access(config())} == {"ok"}
    wide = by_name(access.check_access(config("network.bind=0.0.0.0")))
    assert (wide["keys"].status, wide["token"].status) == ("blocks", "blocks")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    os.chmod(token, 0o644)
    found = by_name(access.check_access(config(f"security.token_file={token}")))
    assert "open to others" in found["token"].text
    os.chmod(token, 0o600)
    assert by_name(access.check_access(config(f"security.token_file={token}")))["token"].status == "ok"


def test_a_router_elsewhere_is_tried(tmp_path: Path) -> None:
    """A TCP connection, nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as router:
        endpoint = f"router.endpoint=tcp://127.0.0.1:{router.getsockname()[1]}"
        assert by_name(access.check_access(config(endpoint)))["router"].status == "ok"
    assert by_name(access.check_access(config(endpoint)))["router"].status == "warning"
