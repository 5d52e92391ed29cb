"""Protocol version and the encoding of control messages: one version byte, then msgpack.

2026-11-29: version 1, first release.
2026-11-29: version 2, a Grant names its generations.
2026-11-29: version 3, Resume and Redispatch; Started, CancelGrant and LegFailed name their epoch.
2026-11-29: version 4, a Pair carries the trace context.
2026-11-29: version 5, SetWire; heartbeats say how it stands.
2026-11-29: version 6, StoreArgs name a LoRA adapter.
"""

from typing import Generic, TypeVar

import msgspec

from pdxfer.core.errors import ProtocolError

PROTOCOL = 6
MAX_MESSAGE_BYTES = 2 << 20
"""Bound of one control message: a Grant for a million tokens in blocks of 16 is below 0.4 MiB."""

_LAST_VERSION = 31
"""No version will be a printable character: what begins with one is not ours."""
_SHOWN_BYTES = 16

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of one message. Asserts our own bound."""
    data = bytes([PROTOCOL]) + _encoder.encode(message)
    assert len(data) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} of {len(data)} bytes"
    return data


class Decoder(Generic[T]):
    """Decodes one union of message types; anything else raises ProtocolError."""

    def __init__(self, union: type[T]) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes | memoryview) -> T:
        """One message. Raises ProtocolError with the reason (size, version, type, field)."""
        if not 2 <= len(data) <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(data)} bytes; allowed are 2..{MAX_MESSAGE_BYTES}")
        if data[0] != PROTOCOL:
            raise ProtocolError(_foreign(bytes(data[:_SHOWN_BYTES])))
        try:
            return self._decoder.decode(memoryview(data)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"malformed message: {error}") from error


def _foreign(start: bytes) -> str:
    """What arrived instead of our version."""
    if 0 < start[0] <= _LAST_VERSION:
        return (
            f"protocol version {start[0]}, this side speaks {PROTOCOL} (the message begins with {start.hex(' ')}): run "
            "the same pdxfer release on both sides"
        )
    return f"no message of pdxfer: it begins with {start!r}; what else talks to this port?"
