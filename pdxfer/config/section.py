"""What all sections of the configuration share: the base struct and the ranges of common fields."""

from typing import Annotated

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
CountOrAuto = Annotated[int, Meta(ge=0)]
Secrets = Annotated[dict[str, str], Meta(extra={"secret": True})]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""
