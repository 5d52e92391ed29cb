"""What lets store and wire use codecs that see KV values: how blocks are packed inside, and the model's tables.

Asked once, when vLLM's KV cache is there. What is not known costs those codecs, never the engine's start.
"""

import logging
from pathlib import Path

import torch

from pdxfer.codec.rank_tables import of_rank
from pdxfer.codec.registry import Codecs
from pdxfer.codec.tables import TableFolder
from pdxfer.config.store import StoreConfig
from pdxfer.connector.packing import DTYPES, form_of
from pdxfer.core.errors import ConfigError
from pdxfer.node.wire_settings import Forms
from pdxfer.store.transcode import OPAQUE, ChunkForm

log = logging.getLogger(__name__)

OF_BYTES = ("raw", "lossless", "zstd")
"""Codecs that see no values."""


def chunk_form(
    cache: torch.Tensor, isa: str, block_size: int, num_layers: int, config: StoreConfig
) -> ChunkForm | None:
    """How this engine's chunks become values; None, and said why, where that is not proved."""
    try:
        return form_of(cache, isa, block_size, num_layers)
    except ConfigError as error:
        wanted = sorted({tier.codec for tier in config.tiers} - set(OF_BYTES))
        level = logging.WARNING if wanted else logging.INFO
        log.log(level, "store: no lossy codec%s: %s", f" ({', '.join(wanted)} stay raw)" if wanted else "", error)
        return None


def wire_forms(cache: torch.Tensor, isa: str, block_size: int) -> Forms | None:
    """How units on the wire become values; None, and said why, where that is not proved."""
    try:
        return form_of(cache, isa, block_size, 1).of_layers
    except ConfigError as error:
        log.info("wire: no lossy codec: %s", error)
        return None


def dtype_of(cache: torch.Tensor) -> str:
    """Of the values, as frames name it; opaque where frames have no name for it."""
    return next((name for name, dtype in DTYPES.items() if dtype == cache.dtype), OPAQUE)


def codecs_of(weights: str, tables_dir: Path, rank: int = 0, num_ranks: int = 1) -> Codecs:
    """With the tables that were calibrated for these weights, cut for a rank; a model without a digest has none."""
    try:
        return Codecs(of_rank(TableFolder(tables_dir, weights), rank, num_ranks))
    except ValueError:
        return Codecs()
