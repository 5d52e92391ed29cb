"""`pdxfer launch`: a router or a proxy in this process; engines, or everything, as supervised children."""

import asyncio
import os
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdxfer.cli.options import AsJson, ConfigFiles, Sets, load_settings, new_app, print_json, say
from pdxfer.config.schema import Config
from pdxfer.core.descriptors import raise_limit
from pdxfer.core.errors import ConfigError
from pdxfer.core.logs import setup_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.launcher.placement import EngineRole
    from pdxfer.launcher.spec import ProcessSpec

app = new_app()


class Role(StrEnum):
    """What to start."""

    router = "router"
    prefill = "prefill"
    decode = "decode"
    both = "both"
    store = "store"
    proxy = "proxy"
    all = "all"


_ENGINE_ROLES: "dict[Role, EngineRole]" = {Role.prefill: "prefill", Role.decode: "decode", Role.both: "both"}


class Engine(StrEnum):
    """Kinds of engine."""

    vllm = "vllm"
    fake = "fake"


@app.command(context_settings={"allow_extra_args": True})
def launch(
    context: typer.Context,
    role: Annotated[Role, typer.Option(help="What to start on this host.")],
    config: ConfigFiles = None,
    set_: Sets = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Model directory, Hugging Face name, or demo.", show_default=False)
    ] = "",
    router: Annotated[
        str, typer.Option(metavar="URL", help="Where the router is, tcp://HOST:PORT.", show_default=False)
    ] = "",
    engine: Annotated[Engine | None, typer.Option(help="fake computes nothing: for a first look.")] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="HTTP port (router: ZMQ port).", show_default=False)
    ] = 0,
    engine_id: Annotated[
        str, typer.Option(metavar="NAME", help="Stable name of this engine.", show_default=False)
    ] = "",
    token_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with the cluster's token.", show_default=False)
    ] = "",
    keys: Annotated[str, typer.Option(metavar="DIR", help="Directory of `pdxfer keys new`.", show_default=False)] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the processes and start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a router, engines, a proxy, or all of them on this host. What follows -- goes to vLLM.

    Example: pdxfer launch --role all --config cpu-1p1d

    Example: pdxfer launch --role both --config cpu-both

    Example: pdxfer launch --role decode --model M --router tcp://A:5570 -- --max-model-len 8192
    """
    flags = {
        "--model": ("model.path", model),
        "--router": ("router.endpoint", router),
        "--engine": ("engine.kind", engine.value if engine else ""),
        "--token-file": ("security.token_file", token_file),
        "--keys": ("security.keys_dir", keys),
    }
    _refuse_ignored(role, engine_id, port)
    if port and role in (Role.router, Role.proxy, Role.all):
        flags["--port"] = ("router.port" if role is Role.router else "proxy.port", str(port))
    given = {flag: value for flag, value in flags.items() if value[1]}
    settings = load_settings(config, set_, given).config
    vllm_args = _vllm_args(context, role)
    if role is Role.router or role is Role.proxy:
        if dry_run:
            raise ConfigError(f"--role {role} starts no other process: there is nothing to show with --dry-run")
        _serve_here(settings, role)
    else:
        _launch(settings, role, vllm_args, engine_id, port, dry_run, as_json)


def _refuse_ignored(role: Role, engine_id: str, port: int) -> None:
    if engine_id and role not in _ENGINE_ROLES:
        hint = "; name engines with topology.prefill and decode: [{id: NAME}]" if role is Role.all else ""
        raise ConfigError(f"--engine-id {engine_id} is of one engine, but --role {role} is none{hint}")
    if port and role is Role.store:
        raise ConfigError(f"--port {port}: --role store listens on no port, but on store.shared_memory")


def _vllm_args(context: typer.Context, role: Role) -> tuple[str, ...]:
    args = tuple(context.args)
    if args and not args[0].startswith("-"):
        raise ConfigError(f"{args[0]!r} is no option; flags for vLLM come after --, as in: -- --max-model-len 8192")
    if args and role in (Role.router, Role.proxy, Role.store):
        raise ConfigError(f"--role {role} starts no engine, but flags for vLLM are given: {' '.join(args)}")
    return args


def _serve_here(config: Config, role: Role) -> None:
    from pdxfer.cli import processes

    setup_logging(config.log.level, config.log.style)
    raise_limit()
    with suppress(KeyboardInterrupt):
        serve = processes.serve_router if role is Role.router else processes.serve_proxy
        serve(config)


def _launch(
    config: Config, role: Role, vllm_args: tuple[str, ...], engine_id: str, port: int, dry_run: bool, as_json: bool
) -> None:
    from pdxfer.cli.processes import proxy_settings
    from pdxfer.config.network import bind_address, local_url, proxy_bind
    from pdxfer.config.token import read_token
    from pdxfer.launcher.engine import Inputs
    from pdxfer.launcher.machine import this_machine
    from pdxfer.launcher.plan import plan_all, plan_engine, plan_store
    from pdxfer.launcher.prepare import prepare
    from pdxfer.launcher.run import run_directory, run_plan

    def plan(config_file: str) -> "list[ProcessSpec]":
        inputs = Inputs(
            config=config,
            config_file=config_file,
            machine=this_machine(),
            token=read_token(config.security.token_file),
            vllm_args=vllm_args,
        )
        if role is Role.all:
            return plan_all(inputs)
        if role is Role.store:
            return plan_store(inputs)
        return plan_engine(inputs, _ENGINE_ROLES[role], engine_id=engine_id, port=port)

    def on_ready() -> None:
        if role is Role.all:
            say(f"OpenAI API: {local_url(proxy_bind(config), config.proxy.port)}/v1")
        elif role is Role.both:
            say(f"OpenAI API: {local_url(bind_address(config), specs[-1].ports[0].port)}/v1")

    if role is Role.all:
        proxy_settings(config)  # refuses now what the proxy would refuse when the engines are up
    if dry_run:
        _print_plan(plan("CONFIG"), as_json)
        return
    raise_limit()
    config = prepare(config, _prepare_demo, has_engines=role is not Role.store)
    with run_directory(config) as file:
        specs = plan(str(file))
        asyncio.run(run_plan(specs, os.environ, sys.stderr, config.engine.max_restarts, on_ready))


def _prepare_demo() -> Path:
    """The demo model's directory; says each stage once."""
    from pdxfer.launcher.demo_model import Stage, prepare_demo_model

    told: set[Stage] = set()

    def report(stage: Stage, done: int, total: int) -> None:
        if stage not in told:
            told.add(stage)
            say(f"demo model: {stage.value}")

    return prepare_demo_model(report=report)


def _print_plan(specs: "Sequence[ProcessSpec]", as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "name": spec.name,
                    "command": spec.shown(),
                    "ports": {use.key: use.port for use in spec.ports},
                    "ready": spec.ready_url,
                    "after": spec.depends_on,
                    "stop_order": spec.stop_order,
                }
                for spec in specs
            ]
        )
        return
    for spec in specs:
        print(f"{spec.name}: after {', '.join(spec.depends_on) or 'nothing'}; ready when {spec.ready_url} answers 200")
        print(f"  {spec.shown()}")
