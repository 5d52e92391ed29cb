"""Names in a configuration that only engines resolve: kinds of channel, codecs, schemes of tiers. Imports none of them.

Asked by the plan and by `pdxfer config check`: an engine finds out minutes later, when its model is loaded.
"""

from pdxfer.codec.registry import Codecs, find_codec
from pdxfer.config.schema import Config
from pdxfer.core.errors import ConfigError
from pdxfer.node.wire_settings import split, wire_settings
from pdxfer.store.open import check_scheme
from pdxfer.store.transcode import OPAQUE
from pdxfer.transport.kinds import endpoint_factories


def check_names(config: Config) -> None:
    """Raise ConfigError for a name that nobody provides, or a store without any. A `module:Class` is believed."""
    endpoint_factories(config.transport.channels)
    if config.store.enabled:
        if not config.store.tiers:
            raise ConfigError("store.enabled is true, but store.tiers is empty: name one, as in [{url: 'dram:'}]")
        for tier in config.store.tiers:
            check_scheme(tier.url)
            _check_codec("store.tiers", tier.codec)
    wire = wire_settings(config.codec, config.model.served_name, Codecs(), None, OPAQUE)
    for entry in wire.entries if wire else []:
        _check_codec("section codec", split(entry)[0])


def _check_codec(where: str, name: str) -> None:
    try:
        find_codec(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
