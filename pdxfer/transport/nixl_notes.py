"""The notes that travel as NIXL notifications, and their seals.

NIXL delivers a notification from whoever has our metadata, so each note carries a keyed tag: hello and welcome under
the router's secret, everything after under keys that both nonces make. A note without a right tag is dropped.

    4s magic "PDXN", u8 version, u8 type, 16s tag (blake2b over type and body), body (msgpack)

2026-11-29: version 1, first release.
2026-11-29: version 2, the welcome names the receiver's generation: a late Grant must not be served over a new channel.
2026-11-29: version 3, receivers send credits for codec frames.
"""

import enum
import hashlib
import hmac
import struct

import msgspec

from pdxfer.core.errors import ProtocolError
from pdxfer.transport.base import PeerId

MAGIC = b"PDXN"
VERSION = 3
HEAD = struct.Struct("<4sBB16s")
MAX_NOTE_BYTES = 1 << 20
NONCE_BYTES = 16


class NoteType(enum.IntEnum):
    """What a note is; the comment says what its body holds."""

    HELLO = 1  # Hello
    WELCOME = 2  # Welcome
    UNIT = 3  # base.UnitHeader; its bytes are in place
    CONTROL = 4  # base.Control
    PROBE = 5  # nothing
    PROBED = 6  # nothing
    PING = 7  # nothing; sending it shows whether the peer is alive
    BYE = 8  # nothing; all writes are done and no more will come


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sender → receiver: who I am, and how to answer me."""

    sender: PeerId
    receiver: PeerId
    nonce: bytes
    metadata: bytes
    """Of the sender's agent."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """receiver → sender: you are admitted."""

    echo: bytes
    """The hello's nonce."""
    nonce: bytes
    generation: int
    """See Channel.generation."""


class Keys:
    """One session's keys, by direction."""

    def __init__(self, secret: bytes, hello: bytes, welcome: bytes) -> None:
        self.to_receiver = hmac.digest(secret, b"pdxfer-nixl-1 >" + hello + welcome, "sha256")
        self.to_sender = hmac.digest(secret, b"pdxfer-nixl-1 <" + hello + welcome, "sha256")


def seal(key: bytes, kind: NoteType, body: bytes = b"") -> bytes:
    """A note to send."""
    assert key and len(body) <= MAX_NOTE_BYTES
    return HEAD.pack(MAGIC, VERSION, kind, _tag(key, kind, body)) + body


def kind_of(note: bytes) -> NoteType:
    """Check a note's fixed part. Raises ProtocolError."""
    if not HEAD.size <= len(note) <= HEAD.size + MAX_NOTE_BYTES:
        raise ProtocolError(f"notification of {len(note)} bytes; a note has {HEAD.size}..{HEAD.size + MAX_NOTE_BYTES}")
    magic, version, number, _ = HEAD.unpack_from(note)
    if magic != MAGIC:
        raise ProtocolError(f"a notification that is none of ours: it begins with {magic!r}")
    if version != VERSION:
        raise ProtocolError(
            f"note version {version}, this side speaks {VERSION}: run the same pdxfer release on both sides"
        )
    try:
        return NoteType(number)
    except ValueError as error:
        raise ProtocolError(f"note of unknown type {number}") from error


def unseal(key: bytes, note: bytes) -> bytes:
    """The body of a note that `kind_of` has passed. Raises ProtocolError if the tag is wrong."""
    _, _, number, tag = HEAD.unpack_from(note)
    body = note[HEAD.size :]
    if not key or not hmac.compare_digest(tag, _tag(key, number, body)):
        raise ProtocolError(f"{NoteType(number).name} note with a wrong tag: not from this session's peer")
    return body


def _tag(key: bytes, kind: int, body: bytes) -> bytes:
    return hashlib.blake2b(bytes([kind]) + body, digest_size=16, key=key[:64]).digest()
