"""The kinds of channel by name: ours, those of installed plug-ins (entry point group pdxfer.channels), `module:Class`.

A kind's file, with the library it needs, is imported when the node asks for it, not before.
"""

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import cast

from pdxfer.core.errors import ConfigError
from pdxfer.memory.region import Region
from pdxfer.transport.base import Endpoint, EndpointFactory, EndpointOptions, PeerId, Sink

STAGED = frozenset({"tcp"})
"""Kinds that can carry codec frames: their receiving side puts bytes wherever the sink says."""

DEFAULT = ("local", "nixl", "tcp")
"""As the configuration has them where nobody has said otherwise."""

BUILT_IN = {
    "local": "pdxfer.transport.local:LocalEndpoint",
    "nixl": "pdxfer.transport.nixl:NixlEndpoint",
    "tcp": "pdxfer.transport.tcp:TcpEndpoint",
    "ucx": "pdxfer.transport.ucx:UcxEndpoint",
}


def preferred(kinds: Sequence[str], has_wire: bool, has_rdma: bool) -> tuple[str, ...]:
    """The order in which kinds are tried. With codecs on the wire and no RDMA device, `tcp` comes before `nixl`: both
    are then TCP, and codecs travel over `tcp` only. An order of the user's own stays."""
    if has_wire and not has_rdma and tuple(kinds) == DEFAULT:
        return ("local", "tcp", "nixl")
    return tuple(kinds)


def endpoint_factories(kinds: Sequence[str]) -> Mapping[str, EndpointFactory]:
    """Factories in the order given. Raises ConfigError for a name that nobody provides."""
    plugins = {point.name: point.value for point in entry_points(group="pdxfer.channels")}
    known = {**plugins, **BUILT_IN}
    factories: dict[str, EndpointFactory] = {}
    for kind in kinds:
        target = kind if ":" in kind else known.get(kind, "")
        if not target:
            raise ConfigError(
                f"transport.channels names {kind!r}; known are {', '.join(sorted(known))} and module:Class"
            )
        factories[kind] = _importing(kind, target)
    return factories


def _importing(kind: str, target: str) -> EndpointFactory:
    def factory(options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> Endpoint:
        module, _, name = target.partition(":")
        try:
            make = cast(EndpointFactory, getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"channel kind {kind} cannot be loaded from {target}: {error}") from error
        return make(options, me, region, sink)

    return factory
