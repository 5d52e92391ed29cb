"""What all control-plane messages share: their base class and their bounds. See messages.py."""

from typing import Annotated

import msgspec

Id = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
BlockIds = Annotated[list[int], msgspec.Meta(max_length=1 << 17)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="m", forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""
