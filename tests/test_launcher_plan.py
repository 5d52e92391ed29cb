"""Launcher plan: which processes a configuration becomes, where engines go, and what is refused."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pdxfer.config.load import load
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.cause import find_cause
from pdxfer.launcher.engine import Inputs
from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.machine import Machine
from pdxfer.launcher.placement import place_engines
from pdxfer.launcher.plan import plan_all, plan_engine, plan_store
from pdxfer.launcher.prepare import prepare
from pdxfer.launcher.ready import check_ports
from pdxfer.launcher.spec import PortUse, ProcessSpec

TWO_CORES = Machine(cpus=(0, 1), hostname="h")


def inputs(*sets: str, config: str = "cpu-1p1d", machine: Machine = TWO_CORES, token: str = "") -> Inputs:
    loaded = load([config], sets, {}).config
    return Inputs(config=loaded, config_file="/run/c.yaml", machine=machine, token=token)


def by_name(specs: list[ProcessSpec]) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in specs}


def connector(spec: ProcessSpec) -> dict[str, object]:
    flags: dict[str, object] = json.loads(spec.argv[spec.argv.index("--kv-transfer-config") + 1])
    return flags


def test_all_is_router_then_engines_then_proxy_and_stops_the_other_way() -> None:
    """The order of readiness and the order of leaving."""
    specs = by_name(plan_all(inputs()))
    assert list(specs) == ["router", "p0", "d0", "proxy"]
    assert specs["p0"].depends_on == specs["d0"].depends_on == ("router",)
    assert specs["proxy"].depends_on == ("router", "p0", "d0")
    assert specs["proxy"].stop_order < specs["p0"].stop_order == specs["d0"].stop_order < specs["router"].stop_order


def test_an_engine_gets_the_connector_its_core_and_its_port() -> None:
    """kv_both always; the pdxfer role is in the extra config; each engine computes on its own core."""
    specs = by_name(plan_all(inputs("topology.prefill_port=9100")))
    flags = connector(specs["p0"])
    assert flags["kv_connector_module_path"] == "pdxfer.connector.vllm"
    assert (flags["kv_role"], flags["kv_load_failure_policy"]) == ("kv_both", "recompute")
    assert flags["kv_connector_extra_config"] == {
        "role": "prefill",
        "engine_id": "p0",
        "config": "/run/c.yaml",
        "router": "tcp://127.0.0.1:5570",
        "url": "http://127.0.0.1:9100",
        "layerwise": True,
    }
    assert specs["p0"].env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert specs["d0"].env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert specs["p0"].argv[specs["p0"].argv.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    assert specs["p0"].argv[specs["p0"].argv.index("--shutdown-timeout") + 1] == "15", (
        "vLLM would abort what runs at once"
    )


def test_cores_are_shared_out_equally_unless_a_place_names_them() -> None:
    """Eight cores, one engine with a place of its own: the other two get halves."""
    machine = Machine(cpus=tuple(range(8)))
    sets = ["topology.prefill=[{cpus: 0-1}, {}]", "topology.decode=1"]
    assert [e.cpus for e in place_engines(inputs(*sets).config, machine)] == ["0-1", "0,1,2,3", "4,5,6,7"]


def test_a_port_beyond_the_last_is_refused_with_its_key() -> None:
    """As the third engine of `prefill_port: 65534` gets."""
    use = PortUse(host="127.0.0.1", port=65536, key="topology.prefill_port")
    spec = ProcessSpec(name="p2", argv=("true",), ports=(use,), ready_url="http://127.0.0.1", ready_timeout_s=1)
    with pytest.raises(LaunchError, match="p2 cannot listen on .*topology.prefill_port.*end at 65535"):
        check_ports([spec])


def test_a_socket_that_another_process_serves_is_refused_and_a_dead_ones_is_not(tmp_path: Path) -> None:
    """Else the other process's answer would pass for ours."""
    path = tmp_path / "store.sock"
    spec = ProcessSpec(name="store", argv=("true",), ready_url=f"unix:{path}", ready_timeout_s=1)
    check_ports([spec])
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        check_ports([spec])
        other.listen()
        with pytest.raises(LaunchError, match=f"store cannot listen on {path}: another process serves it"):
            check_ports([spec])
    check_ports([spec])


def test_fewer_cores_than_engines_are_shared() -> None:
    """Three engines on two cores still start."""
    engines = place_engines(inputs("topology.decode=2").config, TWO_CORES)
    assert [e.cpus for e in engines] == ["0", "1", "0"]


def test_gpus_are_handed_out_in_order_and_must_suffice() -> None:
    """Free GPUs to engines without a place; none left is an error that says how to share one."""
    machine = Machine(cpus=(0, 1), gpus=(0, 1, 2))
    engines = place_engines(inputs("topology.prefill=[{gpus: [1]}]", "topology.decode=2").config, machine)
    assert [e.gpus for e in engines] == [(1,), (0,), (2,)]
    assert [e.cpus for e in engines] == ["", "", ""]
    with pytest.raises(ConfigError, match=r"no GPU is left for topology\.decode\[0\].*gpu_memory_fraction"):
        plan_all(inputs(machine=Machine(cpus=(0,), gpus=(0,))))


def test_one_gpu_config_puts_both_engines_on_it() -> None:
    """With part of its memory each."""
    specs = by_name(plan_all(inputs(config="gpu-1p1d-one-gpu", machine=Machine(cpus=(0, 1), gpus=(0,)))))
    for name in ("p0", "d0"):
        assert specs[name].env["CUDA_VISIBLE_DEVICES"] == "0"
        assert specs[name].argv[specs[name].argv.index("--gpu-memory-utilization") + 1] == "0.4"


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (["proxy.port=8100"], r"port 8100 is given to p0 \(topology.prefill_port\) and to proxy \(proxy.port\)"),
        (["topology.decode=0"], "topology.decode is empty"),
        (["topology.prefill=[{id: d0}]"], "two processes are named 'd0'"),
        (["topology.prefill=[{id: 'a b'}]"], "engine id 'a b'"),
        (["network.bind=0.0.0.0"], "have no token: set security.token_file"),
    ],
)
def test_a_topology_that_cannot_work_is_refused(sets: list[str], error: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=error):
        plan_all(inputs(*sets))


@pytest.mark.parametrize("key", ["router.port", "controller.port", "proxy.port", "topology.decode_port"])
def test_a_port_that_others_are_told_of_is_not_left_to_the_os(key: str) -> None:
    """A child that listens on another one than is asked would be waited for in vain."""
    with pytest.raises(ConfigError, match=f"{key} is 0, but .* must be found by others"):
        plan_all(inputs(f"{key}=0"))


def test_an_engine_alone_has_a_known_port_too() -> None:
    """Its url is told to the router."""
    with pytest.raises(ConfigError, match=r"topology\.decode_port is 0"):
        plan_engine(inputs("topology.decode_port=0"), "decode")


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--port=9000", "--port before the --"),
        ("--served_model_name", "model.served_name"),
        ("--model", "model.path"),
        ("--host", "network.bind"),
        ("--kv-transfer-config={}", "transport"),
    ],
)
def test_flags_that_the_plan_sets_are_refused(flag: str, instead: str) -> None:
    """vLLM takes the last one: the launcher would wait ten minutes at the port that it gave."""
    with pytest.raises(ConfigError, match=f"{flag} is among the flags for vLLM.*{instead}"):
        plan_engine(replace(inputs(), vllm_args=(flag, "x")), "decode")
    with pytest.raises(ConfigError, match="pdxfer sets it itself"):
        plan_all(inputs(f"engine.extra_args=[{flag.partition('=')[0]}, x]"))
    assert plan_all(inputs("engine.extra_args=--num-gpu-blocks-override,17"))


def test_one_engine_takes_the_listed_place_of_its_id() -> None:
    """`--engine-id d1` on a host finds its port and cores in the shared topology."""
    sets = ["topology.decode=[{id: d0, port: 1}, {id: d1, port: 2, cpus: 5}]"]
    (spec,) = plan_engine(inputs(*sets), "decode", engine_id="d1")
    assert (spec.name, spec.ports[0].port, spec.ports[0].key) == ("d1", 2, "topology.decode[1].port")
    assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "5"


def test_an_unlisted_engine_has_a_stable_name_of_host_and_port() -> None:
    """Two hosts that launch a decode engine each do not clash."""
    (spec,) = plan_engine(inputs(), "decode", port=8300)
    assert spec.name == "decode-h-8300"


def test_store_mode_has_no_router() -> None:
    """Role both is one engine alone."""
    (spec,) = plan_engine(inputs(), "both")
    assert "router" not in connector(spec)["kv_connector_extra_config"]  # type: ignore[operator]


def test_a_token_travels_in_the_environment_and_is_not_shown() -> None:
    """Command lines are public on a host."""
    (spec,) = plan_engine(inputs(token="s3cret-s3cret-s3cret"), "decode")
    assert spec.env["VLLM_API_KEY"] == "s3cret-s3cret-s3cret"
    assert "s3cret" not in spec.shown() and "s3cret" not in " ".join(spec.argv)


def test_secrets_in_flags_urls_and_variables_are_not_shown() -> None:
    """Of vLLM's own flags, a tier's URL and engine.env, as --dry-run prints them."""
    sets = ["engine.extra_args=--api-key,s3cret", "engine.env={hf_token: s3cret, http_proxy: 'http://u:s3cret@h'}"]
    shown = by_name(plan_all(inputs(*sets)))["p0"].shown()
    assert "s3cret" not in shown and "--api-key ***" in shown and "http_proxy='http://***@h'" in shown
    sets = ["store.enabled=true", "store.tiers=[{url: 'redis://:s3cret@h'}]"]
    assert "s3cret" not in by_name(plan_all(inputs(*sets, config="fake-1p1d")))["p0"].shown()


def test_children_do_not_see_our_settings_variables() -> None:
    """They are already in the configuration file that children get."""
    (spec,) = plan_engine(inputs(), "decode")
    inherited = {"PDXFER_ROUTER__PORT": "1", "VLLM_CPU_KVCACHE_SPACE": "4", "PATH": "/bin", "PDXFER_HOME": "/x"}
    seen = spec.environment(inherited)
    assert (seen["PATH"], seen["PDXFER_HOME"]) == ("/bin", "/x")
    assert "PDXFER_ROUTER__PORT" not in seen and "VLLM_CPU_KVCACHE_SPACE" not in seen


def test_models_are_found_or_refused_in_one_line(tmp_path: Path) -> None:
    """A directory must be a model; org/name is left to vLLM; demo is prepared."""

    def path(text: str) -> str:
        return prepare(load([], [f"model.path={text}"], {}).config, lambda: tmp_path / "demo").model.path

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert path(str(tmp_path)) == str(tmp_path.resolve())
    assert path("org/name") == "org/name"
    assert path("demo") == str(tmp_path / "demo")
    with pytest.raises(ConfigError, match="does not exist"):
        path("/nowhere/model")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        path(str(tmp_path / "empty"))


def test_the_store_alone_needs_no_model_and_its_socket_may_be_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No demo model is downloaded for it; no directory is named ~."""
    monkeypatch.setenv("HOME", "/home/u")
    sets = ["model.path=/nowhere/model", "store.enabled=true", "store.shared_memory=~/s.sock"]
    config = prepare(load([], sets, {}).config, lambda: Path("/never"), has_engines=False)
    assert config.store.shared_memory == "/home/u/s.sock"
    (spec,) = plan_store(replace(inputs(), config=config))
    assert spec.ready_url == "unix:/home/u/s.sock"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["ok", "ValueError: no such thing", "  at x"], "ValueError: no such thing"),
        (
            [
                "(EngineCore pid=1) ERROR 11-29 [core.py:1] ValueError: bad layout",
                "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "ValueError: bad layout",
        ),
        (["api_server.py: error: unrecognized arguments: --foo"], "unrecognized arguments: --foo"),
        (["error: port is taken"], "port is taken"),
        (["\x1b[31mtorch.OutOfMemoryError: CUDA out of memory\x1b[0m"], "torch.OutOfMemoryError: CUDA out of memory"),
        (["starting", "", "all fine"], "all fine"),
        ([], ""),
    ],
)
def test_the_cause_of_a_death_is_the_error_that_is_no_pointer(lines: list[str], cause: str) -> None:
    """vLLM's last error only points to an earlier one."""
    assert find_cause(lines) == cause


def test_a_gpu_without_a_channel_for_its_memory_is_refused_before_anything_starts() -> None:
    """One line that says what to install or set; CPU engines and the fakes are not concerned."""
    gpu = Machine(cpus=(0, 1), gpus=(0, 1), has_nixl=False, hostname="h")
    with pytest.raises(ConfigError, match=r"engine p0 on GPU 0: KV is in GPU memory.*pip install .*\[nixl\]'"):
        plan_all(inputs("transport.channels=[nixl, tcp]", machine=gpu))
    with pytest.raises(ConfigError, match=r"local: reaches host memory only; tcp.*add nixl to it"):
        plan_all(inputs("transport.channels=[local, tcp]", machine=replace(gpu, has_nixl=True)))
    assert plan_all(inputs("transport.channels=[nixl, tcp]", machine=replace(gpu, has_nixl=True)))
    assert plan_all(inputs("transport.channels=[tcp, 'mine:Endpoint']", machine=gpu)), "a plug-in is believed"
    assert plan_all(inputs("transport.channels=[nixl, tcp]", "engine.kind=fake", machine=gpu))
    assert plan_all(inputs("transport.channels=[nixl, tcp]", machine=replace(gpu, gpus=())))
