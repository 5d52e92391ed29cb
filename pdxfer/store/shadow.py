"""Values that have left their tier for a moment while manage_copy.py replaces them: slot.py shows them meanwhile."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdxfer.store.base import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """What readers see. `view` is ordinary memory: it lives as long as somebody has it."""

    entry: Entry
    view: memoryview


class ShadowLease:
    """Implements base.Lease; nothing has to be given back."""

    def __init__(self, shadow: Shadow) -> None:
        self.view = shadow.view

    def release(self) -> None:
        """Nothing to do."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
