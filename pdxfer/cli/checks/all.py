"""All checks in the order doctor prints them."""

from collections.abc import Mapping

from pdxfer.cli.checks.access import check_access
from pdxfer.cli.checks.channels import check_channels
from pdxfer.cli.checks.finding import Finding, blocks, ok, warning
from pdxfer.cli.checks.machine import check_machine
from pdxfer.cli.checks.model import check_model
from pdxfer.cli.checks.software import check_software
from pdxfer.config.network import bind_address
from pdxfer.config.schema import Config
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.demo_model import demo_model_dir
from pdxfer.launcher.engine import Inputs
from pdxfer.launcher.machine import Machine
from pdxfer.launcher.placement import place_engines
from pdxfer.launcher.plan import plan_all


def run_checks(config: Config, machine: Machine, environ: Mapping[str, str]) -> list[Finding]:
    """Findings of everything, for running `--role all` with this configuration here."""
    model, weights_bytes = check_model(config, demo_model_dir(environ))
    findings = [*check_software(config, bool(machine.gpus)), *model, *check_channels(config, environ)]
    try:
        bind_address(config)
    except ConfigError as error:
        return [*findings, blocks("network", str(error), "see the message")]
    try:
        engines = place_engines(config, machine)
        specs = plan_all(Inputs(config=config, config_file="", machine=machine, token="checked elsewhere"))
    except ConfigError as error:
        return [*findings, blocks("topology", str(error), "see the message"), *check_access(config)]
    places = "; ".join(f"{e.engine_id} on {_place(e.gpus, e.cpus)}, port {e.port}" for e in engines)
    used = [gpu for engine in engines for gpu in engine.gpus]
    findings += [_gpus(machine, used), ok("topology", places)]
    if used and config.engine.kind != "fake":
        findings.append(_gpu_memory())
    return [*findings, *check_machine(config, specs, len(engines), weights_bytes), *check_access(config)]


def _gpus(machine: Machine, used: list[int]) -> Finding:
    text = f"{len(machine.gpus)} NVIDIA GPUs, {len(machine.cpus)} CPU cores"
    missing = sorted(set(used) - set(machine.gpus))
    if missing:
        return blocks("devices", f"{text}; the topology wants GPU {missing[0]}", "use a cpu config, or change `gpus`")
    return ok("devices", text)


def _gpu_memory() -> Finding:
    """Tested against fakes only, so who runs it first must know."""
    return warning(
        "gpu memory",
        "KV in GPU memory moves by nixl only, whatever the choice above; written, but never run on a GPU so far",
        "compare answers with one engine's before you rely on it; see docs/gpu.md",
    )


def _place(gpus: tuple[int, ...], cpus: str) -> str:
    if gpus:
        return f"GPU {','.join(map(str, gpus))}"
    return f"cores {cpus}" if cpus else "cores of vLLM's choice"
