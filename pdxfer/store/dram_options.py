"""The further settings of a DRAM tier (`options` of its section), read and checked."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self

from pdxfer.config.store import TierConfig
from pdxfer.core.errors import ConfigError

_KNOWN = ("lock", "numa_node", "populate")
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class DramOptions:
    """See dram.py."""

    lock: bool = False
    numa_node: int | None = None
    populate: bool = True

    @classmethod
    def of(cls, config: TierConfig) -> Self:
        """From text. ConfigError names the option and what it may be."""
        for name in config.options:
            if name not in _KNOWN:
                near = get_close_matches(name, _KNOWN, n=1) or _KNOWN
                raise _wrong(config, name, f"is unknown; did you mean {' or '.join(near)}?")
        return cls(
            lock=_flag(config, "lock", False),
            numa_node=_node(config, "numa_node"),
            populate=_flag(config, "populate", True),
        )


def _flag(config: TierConfig, name: str, default: bool) -> bool:
    text = config.options.get(name, str(default)).lower()
    if text not in _FLAGS:
        raise _wrong(config, name, f"is {text!r}; it must be true or false")
    return _FLAGS[text]


def _node(config: TierConfig, name: str) -> int | None:
    text = config.options.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) >= 1024:
        raise _wrong(config, name, f"is {text!r}; it must be the number of a NUMA node (see `numactl -H`)")
    return int(text)


def _wrong(config: TierConfig, name: str, what: str) -> ConfigError:
    return ConfigError(f"store.tiers: option {name!r} of {config.url!r} {what}")
