"""Compiles the C files beside it into one shared library; standard library only, because installers run it.

Called by hatch_build.py for wheels and editable installs, and by hand: python -m pdxfer.codec.native. Each file
is compiled once per instruction set, with `PDX(name)` giving its functions that set's suffix; __init__.py picks at run
time. No compiler is no failure: the codecs then run through numba or numpy.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "_native.so"
TIMEOUT_S = 300

LEVELS = {
    "x86_64": {"v1": ["-march=x86-64"], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]},
    "aarch64": {"v1": ["-march=armv8-a"]},
}
"""Machine → suffix of its instruction sets → compiler flags, weakest first. v3: AVX2, v4: AVX-512 (F BW DQ VL CD)."""
FLAGS = [
    "-std=c11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]
"""No fast-math and no contraction: all versions of a kernel give the same bits."""


def sources(folder: Path = HERE) -> list[Path]:
    """The C files, in a fixed order."""
    return sorted(folder.glob("*.c"))


def digest(folder: Path = HERE) -> str:
    """Of all C files and headers: what a library must carry to be used with them."""
    state = hashlib.sha256()
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:32]


def levels() -> dict[str, list[str]]:
    """Instruction sets of this machine; one without flags where we know none."""
    return LEVELS.get(platform.machine(), {"v1": []})


def compiler() -> list[str] | None:
    """$CC, else cc, gcc or clang, if there is one."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    for candidate in (command, ["gcc"], ["clang"]):
        if shutil.which(candidate[0]):
            return candidate
    return None


def build(target: Path = HERE / LIBRARY, extra: list[str] | None = None) -> Path:
    """Compile and put the library at `target` in one step. Raises RuntimeError with the compiler's words."""
    cc = compiler()
    if cc is None:
        raise RuntimeError("no C compiler (cc, gcc, clang or $CC)")
    with tempfile.TemporaryDirectory(prefix="pdxfer-native-") as folder:
        objects = []
        for suffix, flags in levels().items():
            for source in sources():
                built = Path(folder) / f"{source.stem}_{suffix}.o"
                define = [f"-DPDX_SUFFIX=_{suffix}", f'-DPDX_DIGEST="{digest()}"']
                _run([*cc, *FLAGS, *flags, *define, *(extra or []), "-c", str(source), "-o", str(built)])
                objects.append(str(built))
        linked = Path(folder) / LIBRARY
        _run([*cc, "-shared", *(extra or []), *objects, "-o", str(linked), "-lm"])
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, beside)
        os.replace(beside, target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
