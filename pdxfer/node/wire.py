"""Codecs on the wire for one rank: its frames, decode's staging, the lanes' senders, the codecs' rates, the switch.

Made by the node where `codec.wire` is not off. Rates are measured in the background before the first request needs
them; until then, and where anything is unknown, units go the direct way.
"""

import logging
import threading
from collections.abc import Mapping

import numpy as np

from pdxfer.codec.values import from_float
from pdxfer.core.clock import Clock
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import PdxferError
from pdxfer.memory.region import Region
from pdxfer.node.staging import Staging
from pdxfer.node.wire_choice import Chooser, Rates
from pdxfer.node.wire_frames import WireFrames
from pdxfer.node.wire_sender import WireCounts, WireSender
from pdxfer.node.wire_settings import WireSettings, split
from pdxfer.transport.base import UnitHeader

log = logging.getLogger(__name__)

NUM_TRIES = 3
"""The best of so many: the machine may be busy starting engines."""


class Wire:
    """What the node's sender and receiver need to send and take frames."""

    def __init__(
        self,
        settings: WireSettings,
        region: Region,
        fingerprint: Mapping[str, str],
        chunk_blocks: int,
        clock: Clock,
    ) -> None:
        """Raises ConfigError for a codec or level that nobody provides."""
        self._settings, self._region, self._clock = settings, region, clock
        self._chunk_blocks = chunk_blocks
        self._frames = WireFrames(settings, fingerprint, region.layout.block_size)
        self._fixed = settings.codec if settings.codec != "auto" else ""
        self._rates: dict[str, Rates] = {}
        self._counts = WireCounts()
        self._is_on = True
        self.staging = Staging(settings, self._frames, region, chunk_blocks, clock)
        self._measuring = threading.Thread(target=self._measure, name="pdxfer-wire-rates", daemon=True)
        if not self._fixed:
            self._measuring.start()

    def switch(self, is_on: bool) -> None:
        """Send frames, or everything raw, from the next prompt on. What comes in is decoded either way."""
        self._is_on = is_on

    @property
    def is_on(self) -> bool:
        """How the switch stands."""
        return self._is_on

    def codecs_of(self, tenant: str) -> tuple[str, ...]:
        """What may be used for a tenant's KV now."""
        return self._settings.allowed(tenant) if self._is_on else ()

    def sender(self, engine_id: str) -> WireSender:
        """For the lane to one engine."""
        chooser = Chooser(self._rates, self._fixed)
        return WireSender(engine_id, self._frames, chooser, self._region, self._counts, self._clock)

    def counts(self) -> dict[str, int]:
        """Totals for the heartbeat (metrics/catalog.py)."""
        return {
            "wire_frames": self._counts.frames,
            "wire_raw_units": self._counts.raw_units,
            "wire_saved_bytes": self._counts.saved_bytes,
            "wire_bad_frames": self.staging.num_bad,
        }

    def wait_measured(self, timeout_s: float) -> bool:
        """Whether the rates are known; benches and tests wait for them."""
        self._measuring.join(timeout_s)
        return not self._measuring.is_alive()

    # ---- how -------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        unpin_current_thread()
        layout = self._region.layout
        num_bytes = self._chunk_blocks * layout.num_layers * layout.block_bytes
        values = np.random.default_rng(0).standard_normal(num_bytes // 2, dtype=np.float32)
        raw = np.zeros(num_bytes, dtype=np.uint8)
        raw[: values.size * 2] = from_float(values, "bfloat16")
        for entry in self._settings.entries:
            try:
                self._rates[entry] = self._rate(entry, raw)
                log.info("wire: %s %s", entry, _words(self._rates[entry]))
            except Exception as error:  # an installed codec may raise anything; the others are measured all the same
                expected = isinstance(error, PdxferError | ValueError)
                log.warning("wire: codec %s cannot be used here: %s", entry, error, exc_info=not expected)

    def _rate(self, entry: str, raw: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> Rates:
        codec = self._frames.codec(*split(entry))
        unit = UnitHeader(
            transfer_id="rates",
            epoch=0,
            first_block=self._chunk_blocks,
            num_blocks=self._chunk_blocks,
            first_layer=0,
            num_layers=self._region.layout.num_layers,
            num_bytes=raw.nbytes,
            digest=0,
        )
        encode_s = decode_s = float("inf")
        frame = b""
        for _ in range(NUM_TRIES):
            start = self._clock.now()
            parts = self._frames.encode(raw, unit, codec)
            encode_s = min(encode_s, self._clock.now() - start)
            frame = b"".join(parts)
            start = self._clock.now()
            self._frames.decode(memoryview(frame), unit)
            decode_s = min(decode_s, self._clock.now() - start)
        return Rates(ratio=raw.nbytes / len(frame), encode=raw.nbytes / encode_s, decode=raw.nbytes / decode_s)


def _words(rates: Rates) -> str:
    return f"x{rates.ratio:.2f}, encode {rates.encode / 1e9:.2f} GB/s, decode {rates.decode / 1e9:.2f} GB/s"
