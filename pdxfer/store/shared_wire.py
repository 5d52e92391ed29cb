"""What engines and the store process of one host say to each other over their Unix socket.

A frame is a little-endian u32 length and one msgpack struct. Values never cross: they lie in the shared segment, whose
fd comes with Welcome; messages name them by offset. Deadlines are absolute seconds of CLOCK_MONOTONIC, one clock for
all processes of a host. Both sides refuse another VERSION naming both.
"""

import struct
from collections.abc import Callable

import msgspec

from pdxfer.core.errors import ProtocolError
from pdxfer.store.base import Entry, Outcome

VERSION = 1
"""1: first (2026-11-29)."""
MAX_FRAME_BYTES = 4 << 20
MOST_KEYS = 16_384
"""In one lookup, delete, pin or unpin; the client asks in several steps for more."""
LONGEST_PAGE = 1024
"""Entries of one scan."""
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""


class Welcome(Message, frozen=True, tag="welcome"):
    """First frame of the server; the segment's fd travels with it."""

    version: int
    num_bytes: int
    pid: int


class Refused(Message, frozen=True, tag="refused"):
    """Instead of Welcome: why this process may not attach."""

    reason: str


class Lookup(Message, frozen=True, tag="lookup"):
    """→ Entries, one a key."""

    id: int
    keys: list[bytes]


class Get(Message, frozen=True, tag="get"):
    """→ Held (a lease) or Ended(None)."""

    id: int
    key: bytes


class Reserve(Message, frozen=True, tag="reserve"):
    """→ Held (a reservation) or Ended(why not), by the deadline."""

    id: int
    key: bytes
    num_bytes: int
    deadline: float
    tenant: str


class Commit(Message, frozen=True, tag="commit"):
    """→ Ended. Ends the handle."""

    id: int
    handle: int
    deadline: float


class Drop(Message, frozen=True, tag="drop"):
    """Ends a lease, or aborts a reservation. No answer."""

    handle: int


class Delete(Message, frozen=True, tag="delete"):
    """→ Count."""

    id: int
    keys: list[bytes]


class Pin(Message, frozen=True, tag="pin"):
    """→ Count."""

    id: int
    keys: list[bytes]
    ttl_s: float | None


class Unpin(Message, frozen=True, tag="unpin"):
    """→ Count."""

    id: int
    keys: list[bytes]


class Scan(Message, frozen=True, tag="scan"):
    """→ Entries."""

    id: int
    after: bytes
    limit: int


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """The tier as a whole at the time of an answer."""

    used_bytes: int
    capacity_bytes: int
    num_values: int
    pinned_bytes: int
    evictions: int


class Held(Message, frozen=True, tag="held"):
    """A lease or reservation, until Commit, Drop or the end of the connection."""

    id: int
    figures: Figures
    handle: int
    offset: int
    num_bytes: int


class Ended(Message, frozen=True, tag="ended"):
    """Of a commit or a refused reservation; None: a get that missed."""

    id: int
    figures: Figures
    outcome: Outcome | None


class Entries(Message, frozen=True, tag="entries"):
    """Of lookup and scan."""

    id: int
    figures: Figures
    entries: list[Entry | None]


class Count(Message, frozen=True, tag="count"):
    """Of delete, pin and unpin."""

    id: int
    figures: Figures
    count: int


class Evicted(Message, frozen=True, tag="evicted"):
    """Unasked, to all: keys that went by themselves; `lost`: there were more, look for yourself."""

    keys: list[bytes]
    lost: bool


Question = Lookup | Get | Reserve | Commit | Delete | Pin | Unpin | Scan
Request = Question | Drop
Answer = Held | Ended | Entries | Count
FromServer = Welcome | Refused | Answer | Evicted

decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
decode_from_server: Callable[[bytes], FromServer] = msgspec.msgpack.Decoder(FromServer).decode


def pack(message: Message) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_FRAME_BYTES, (type(message).__name__, len(body))
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they come from a socket → bodies of whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete now. ProtocolError for a length beyond the bound."""
        self._data += data
        bodies, at = [], 0
        while len(self._data) - at >= _LENGTH.size:
            end = at + _LENGTH.size + frame_bytes(self._data[at : at + _LENGTH.size])
            if end > len(self._data):
                break
            bodies.append(bytes(self._data[at + _LENGTH.size : end]))
            at = end
        del self._data[:at]
        return bodies


def frame_bytes(head: bytes | bytearray) -> int:
    """Length of the body after these four bytes. ProtocolError beyond the bound."""
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is announced on the store socket; at most {MAX_FRAME_BYTES}")
    return length
