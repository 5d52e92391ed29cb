"""Entry of the store process: reads its settings, opens the tier in shared memory, serves until SIGTERM."""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import msgspec

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.core.logs import setup_logging
from pdxfer.store.dram import DramTier
from pdxfer.store.open import limits, scheme_of
from pdxfer.store.server import StoreServer, shared_segment

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """0: stopped by a signal; 2: a setting is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m pdxfer.store.server",
        description="Keeps the DRAM tier of this host for all engines on it.",
    )
    parser.add_argument("--store", required=True, metavar="JSON", help="the section `store` of the configuration")
    parser.add_argument("--log-level", default="INFO")
    options = parser.parse_args(argv)
    setup_logging(options.log_level)
    try:
        config = msgspec.json.decode(options.store, type=StoreConfig)
        asyncio.run(serve(config))
    except (ConfigError, msgspec.DecodeError) as error:
        print(f"store: {error}", file=sys.stderr)
        return 2
    return 0


async def serve(config: StoreConfig) -> None:
    """Until SIGTERM or SIGINT."""
    if not config.shared_memory:
        raise ConfigError("store.shared_memory is empty: set it to the path of the socket to serve")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tier = DramTier(_dram(config), SYSTEM_CLOCK, **limits(config), make_segment=shared_segment)
    await tier.open()
    server = StoreServer(tier, SYSTEM_CLOCK, Path(config.shared_memory))
    try:
        await server.start()
        await stop.wait()
        log.info("store: stopping, %d engines attached", server.num_engines)
    finally:
        await server.close()


def _dram(config: StoreConfig) -> TierConfig:
    for tier in config.tiers:
        if scheme_of(tier.url) == "dram":
            return tier
    raise ConfigError("store.tiers has no `dram:` tier, so there is nothing for the store process to keep")
