"""Put on PYTHONPATH of an engine, it keeps vLLM's NIXL connector from pinning the compute thread to a NUMA node's last
core: on a small machine that puts both engines of a pair on one core. Only the benches use it, for a fair peer."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_TARGET = "vllm.platforms.cpu"


class _Unpinned(importlib.abc.Loader):
    """Loads the platform module and empties the topology that the connector pins by."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


class _Finder(importlib.abc.MetaPathFinder):
    """Stands in front of the real finders for one import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Unpinned(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
