"""Config: order of sources, errors that say where, and what is shown."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from pdxfer.config import network
from pdxfer.config.load import dump, find_config, load, packaged_configs
from pdxfer.config.redact import REDACTED, redacted
from pdxfer.config.schema import Config, NetworkConfig, RouterConfig
from pdxfer.config.shape import descriptions, json_schema
from pdxfer.config.show import rows
from pdxfer.core.errors import ConfigError


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_later_sources_win_and_their_origin_is_kept(tmp_path: Path) -> None:
    """defaults < files in order < environment < --set."""
    first = write(tmp_path, "router:\n  port: 1\n  max_queue: 10\nproxy:\n  port: 11\n", "1.yaml")
    second = write(tmp_path, "router:\n  port: 2\n", "2.yaml")
    env = {"PDXFER_PROXY__PORT": "12", "PDXFER_CONTROLLER__PORT": "13", "PDXFER_OTHER": "x", "PATH": "/bin"}
    loaded = load([first, second], ["controller.port=14"], env)
    assert (loaded.config.router.port, loaded.config.router.max_queue) == (2, 10)
    assert (loaded.config.proxy.port, loaded.config.controller.port) == (12, 14)
    origins = {row.key: row.origin for row in rows(loaded)}
    assert origins["router.port"] == f"{second}:2"
    assert origins["router.max_queue"] == f"{first}:3"
    assert origins["proxy.port"] == "PDXFER_PROXY__PORT"
    assert origins["controller.port"] == "--set controller.port"
    assert origins["log.level"] == "default"


def test_mappings_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    """An overlay adds to engine.env and replaces engine.extra_args."""
    first = write(tmp_path, "engine:\n  env: {A: '1', B: '2'}\n  extra_args: [-x]\n", "1.yaml")
    second = write(tmp_path, "engine:\n  env: {B: '3'}\n  extra_args: [-y]\n", "2.yaml")
    engine = load([first, second], ["engine.env.C=4"], {}).config.engine
    assert engine.env == {"A": "1", "B": "3", "C": "4"}
    assert engine.extra_args == ["-y"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("model:\n  path: m\nrooter:\n  port: 1\n", "c.yaml:3: unknown section rooter; did you mean router?"),
        ("router:\n  max_queu: 5\n", "c.yaml:2: unknown key router.max_queu; did you mean router.max_queue?"),
        ("log:\n  zzz: 5\n", "c.yaml:2: unknown key log.zzz; known are level, style"),
        ("topology:\n  prefill:\n  - prt: 1\n", "c.yaml:3: unknown key topology.prefill[0].prt; did you mean"),
        (
            "topology:\n  decode:\n  - port: 1\n  - port: a\n",
            "c.yaml:4: topology.decode[1].port: expected int, got str",
        ),
        ("router: 5\n", "c.yaml:1: router: expected a mapping, got int 5"),
        ("- a\n", "c.yaml:1: expected sections"),
        ("router:\n  port: 99999\n", "c.yaml:2: router.port: expected int <= 65535, got 99999"),
        ("log:\n  level: LOUD\n", "c.yaml:2: log.level: expected one of DEBUG, ERROR, INFO, WARNING, got 'LOUD'"),
        ("engine:\n  env:\n    A: 1\n", "c.yaml:2: engine.env: expected str, got int"),
        ("network:\n  ports: [9, 3]\n", "network: ports is [9, 3]"),
        ("router:\n  port: 1\n  port: 2\n", "c.yaml:3: router.port is set twice"),
        ("router: {port: 1\n", "c.yaml:2: not valid YAML"),
        ("router: &a\n  port: *a\n", "nested deeper than any setting"),
        ("[" * 3000, "nested deeper than any setting"),
        ("model:\n  path: 2026-13-45\n", "c.yaml:2: model.path: '2026-13-45' cannot be read: month must be in 1..12"),
        ("router:\n  port: !!int abc\n", "c.yaml:2: router.port: 'abc' cannot be read"),
        ('model:\n  path: "\\ud800"\n', "c.yaml:2: model.path: '\\ud800' cannot be read"),
        ('model:\n  path: "a\\0b"\n', "c.yaml:2: model.path holds a zero byte"),
    ],
)
def test_a_mistake_in_a_file_names_key_file_and_line(tmp_path: Path, text: str, error: str) -> None:
    """Unknown keys name the nearest known one; wrong types say what was expected and found."""
    with pytest.raises(ConfigError) as caught:
        load([write(tmp_path, text)], [], {})
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "env", "error"),
    [
        (["router.port=x"], {}, "--set router.port: router.port: expected int, got str 'x'"),
        (["router"], {}, "write --set section.key=value"),
        (["router.prt=1"], {}, "--set router.prt: unknown key router.prt; did you mean router.port?"),
        (["topology.prefill=[{prt: 1}]"], {}, "--set topology.prefill: unknown key topology.prefill[0].prt"),
        (["engine.env.A=1", "engine.env.A.B=2"], {}, "--set engine.env.A.B: engine.env.A is already set to one value"),
        ([], {"PDXFER__PORT": "1"}, "PDXFER__PORT: write a setting's variable as PDXFER_SECTION__KEY"),
        ([], {"PDXFER_PORT__": "1"}, "PDXFER_PORT__: write a setting's variable as PDXFER_SECTION__KEY"),
        ([], {"PDXFER_ROUTER__PORT": ""}, "PDXFER_ROUTER__PORT: router.port: expected int, got null"),
        ([], {"PDXFER_ROUTR__PORT": "1"}, "PDXFER_ROUTR__PORT: unknown section routr; did you mean router?"),
        (
            [],
            {"PDXFER_ENGINE__ENFORCE_EAGER": "perhaps"},
            "PDXFER_ENGINE__ENFORCE_EAGER: engine.enforce_eager: expected",
        ),
    ],
)
def test_a_mistake_elsewhere_names_the_flag_or_variable(sets: list[str], env: dict[str, str], error: str) -> None:
    """The same for --set and the environment."""
    with pytest.raises(ConfigError) as caught:
        load([], sets, env)
    assert error in str(caught.value)


def test_text_is_read_by_the_type_of_its_key() -> None:
    """--set model.path=1 is a name, transport.channels=a,b a list, topology.prefill=2 a number."""
    sets = ["model.path=1", "transport.channels=tcp,local", "topology.prefill=2", "network.ports=[1, 2]"]
    config = load([], sets, {}).config
    assert config.model.path == "1"
    assert config.transport.channels == ["tcp", "local"]
    assert config.topology.prefill == 2
    assert config.network.ports == (1, 2)


def test_an_empty_section_is_the_default(tmp_path: Path) -> None:
    """`router:` with nothing below it changes nothing."""
    assert load([write(tmp_path, "router:\n")], [], {}).config == Config()


@pytest.mark.parametrize("name", packaged_configs())
def test_packaged_configs_load_by_name_and_survive_a_dump(name: str, tmp_path: Path) -> None:
    """What launch hands to its children is what it read."""
    config = load([name], [], {}).config
    assert load([write(tmp_path, dump(config))], [], {}).config == config


def test_an_unknown_config_name_lists_the_known() -> None:
    """With the nearest first."""
    with pytest.raises(ConfigError, match="did you mean 'cpu-1p1d'.*fake-1p1d"):
        find_config("cpu-1p1")


def test_secrets_are_not_shown() -> None:
    """Neither API keys nor variables that look like secrets."""
    loaded = load([], ["proxy.api_keys={s3cret: me}", "engine.env.HF_TOKEN=s3cret", "engine.env.A=b"], {})
    shown = {row.key: row.value for row in rows(loaded)}
    assert shown["proxy.api_keys"] == REDACTED
    assert shown["engine.env"] == {"HF_TOKEN": REDACTED, "A": "b"}


@pytest.mark.parametrize(
    ("sets", "env", "origin"),
    [
        (["proxy.api_keys.s3cret=me"], {}, "--set proxy.api_keys.***"),
        ([], {"PDXFER_PROXY__API_KEYS__s3cret": "me"}, "PDXFER_PROXY__API_KEYS__***"),
    ],
)
def test_a_secret_in_a_key_is_not_shown_as_an_origin(sets: list[str], env: dict[str, str], origin: str) -> None:
    """API keys are keys of the mapping; nor do errors show them."""
    shown = {row.key: row.origin for row in rows(load([], sets, env))}
    assert shown["proxy.api_keys"] == origin
    with pytest.raises(ConfigError, match=re.escape("--set proxy.api_keys.***: ")) as caught:
        load([], ["proxy.api_keys.s3cret=me", "proxy.api_keys.s3cret.x=me"], {})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://u:p@ss@h:6379/0", "redis://***@h:6379/0"),
        ("http://h:1/path@x", "http://h:1/path@x"),
        (["--api-key", "s3cret", "-x"], ["--api-key", REDACTED, "-x"]),
        (["--hf-token=s3cret", "--tokenizer", "t"], [f"--hf-token={REDACTED}", "--tokenizer", "t"]),
        (["--max-num-batched-tokens", "5"], ["--max-num-batched-tokens", "5"]),
    ],
)
def test_secrets_in_urls_and_flags_are_not_shown(value: object, shown: object) -> None:
    """A password may hold an @; flags of vLLM may be keys."""
    assert redacted(value) == shown


def test_every_key_has_a_meaning_and_the_schema_accepts_the_packaged_configs() -> None:
    """The text under each field is its description."""
    jsonschema = pytest.importorskip("jsonschema")
    for section in msgspec.structs.fields(Config):
        for key in msgspec.structs.fields(section.type):
            assert descriptions()[section.type.__name__][key.name], key.name
    for name in packaged_configs():
        jsonschema.validate(yaml.safe_load(find_config(name).read_text()), json_schema())


def test_addresses_follow_from_bind_and_router() -> None:
    """Loopback stays loopback; a wildcard bind advertises the way to the router."""
    assert network.advertised(Config()) == "127.0.0.1"
    assert network.router_endpoint(Config()) == "tcp://127.0.0.1:5570"
    wide = Config(network=NetworkConfig(bind="0.0.0.0"), router=RouterConfig(endpoint="tcp://127.0.0.1:1"))
    assert network.advertised(wide) == "127.0.0.1"
    assert network.controller_url(wide) == "http://127.0.0.1:5580"
    with pytest.raises(ConfigError, match=r"network\.interface is 'nope0'.*use one of"):
        network.advertised(Config(network=NetworkConfig(interface="nope0")))
