"""Build hook: compiles the codecs' C library into wheels and editable installs where a compiler is there.

Without one the installation goes on: pdxfer then runs these codecs through numba or numpy.
"""

import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "pdxfer/codec/native"


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs for the target `wheel`, which editable installs are too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the library beside its sources and into the wheel, and name the wheel's platform."""
        builder = runpy.run_path(str(Path(self.root) / NATIVE / "build.py"))
        try:
            builder["build"]()
        except (RuntimeError, OSError) as error:
            print(f"pdxfer: native codecs not built, numba or numpy will do their work: {error}", file=sys.stderr)
            return
        build_data["artifacts"].append(f"{NATIVE}/{builder['LIBRARY']}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
