"""What nodes ask each other's stores: one frame a question and its answer, typed and bounded (transport/frames.py).

A question is a CONTROL frame; so is its answer, but for a value: a UNIT frame whose payload is the stored frame. After
Follow only the serving side speaks: Told, and Quiet while nothing happens.
"""

from typing import Annotated, TypeVar

import msgspec

from pdxfer.core.errors import ProtocolError
from pdxfer.store.base import Entry
from pdxfer.wire.base import Id, Text
from pdxfer.wire.store_facts import Key

KIND = "store"
"""What a handshake of this service names, where channels name theirs."""
MAX_KEYS = 1024
"""Of one question, answer or batch."""
MAX_TIERS = 16
T = TypeVar("T")

Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]


class Talk(msgspec.Struct, frozen=True, kw_only=True, tag_field="m", forbid_unknown_fields=True):
    """Base of all."""


class Ping(Talk, tag="ping", frozen=True):
    """Are you there? Answer Quiet."""


class Read(Talk, tag="read", frozen=True):
    """The value of this key, from the tier named or the first that has it. Answer Value, or Absent."""

    key: Key
    tier: Id = ""


class Look(Talk, tag="look", frozen=True):
    """What do you have of these keys? Answer Entries, one a key."""

    keys: Keys


class Page(Talk, tag="page", frozen=True):
    """The first keys after this one, in order, in the tier named or in any. Answer Entries."""

    after: Annotated[bytes, msgspec.Meta(max_length=64)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_KEYS)]
    tier: Id = ""


class Remove(Talk, tag="remove", frozen=True):
    """They were moved: delete them from the tier named or all of yours, but for pinned ones. Answer Removed."""

    keys: Keys
    tier: Id = ""


class Follow(Talk, tag="follow", frozen=True):
    """From now on tell what your tiers hold: all of it first, then every change."""


class Value(Talk, tag="value", frozen=True):
    """The payload is the value."""

    tier: Id
    tenant: Id = ""


class Absent(Talk, tag="absent", frozen=True):
    """It is not here (any more)."""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value: a base.Entry on the wire."""

    key: Key
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]
    pinned: bool = False
    created_wall: float = 0.0
    hits: int = 0
    tenant: Id = ""

    @classmethod
    def of(cls, entry: Entry) -> "Item":
        """As told."""
        return cls(
            key=entry.key, num_bytes=entry.num_bytes, pinned=entry.pinned, created_wall=entry.created_wall,
            hits=entry.hits, tenant=entry.tenant,
        )  # fmt: skip

    def entry(self) -> Entry:
        """As heard."""
        return Entry(
            key=self.key, num_bytes=self.num_bytes, pinned=self.pinned, created_wall=self.created_wall,
            hits=self.hits, tenant=self.tenant,
        )  # fmt: skip


class Entries(Talk, tag="entries", frozen=True):
    """Answer to Look and Page."""

    items: Annotated[list[Item | None], msgspec.Meta(max_length=MAX_KEYS)]


class Removed(Talk, tag="removed", frozen=True):
    """What became of the keys that were to go, one word each: removed, kept_pinned, kept_shared or absent."""

    said: Annotated[list[Id], msgspec.Meta(max_length=MAX_KEYS)]


class Failed(Talk, tag="failed", frozen=True):
    """It could not be done; the connection goes on."""

    reason: Text


class Told(Talk, tag="told", frozen=True):
    """A batch of events.py. Numbered without gaps on this connection, beginning with 1."""

    seq: int
    tier: Id
    added: Keys = []
    evicted: Keys = []
    restart: bool = False


class Quiet(Talk, tag="quiet", frozen=True):
    """Nothing happened; we are there."""


Question = Ping | Read | Look | Page | Remove | Follow
Answer = Value | Absent | Entries | Removed | Failed | Told | Quiet

encode = msgspec.msgpack.Encoder().encode
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def question(data: bytes) -> Question:
    """Raises ProtocolError."""
    return _decode(_questions, data)


def answer(data: bytes) -> Answer:
    """Raises ProtocolError."""
    return _decode(_answers, data)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message between stores: {error}") from error
