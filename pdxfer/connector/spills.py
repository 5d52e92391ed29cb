"""Prefills that are over and whose grant does not come: their KV goes to the store, their blocks back to the engine.

    held ──spill_after──▶ spilling ──every chunk has a tier──▶ spilled: decode is told, references go back
      └── the grant came, or it ended ──▶ gone        └── no room ──▶ held until the deadline, as without a store

Only where other engines reach a tier. decode then finds the chunks as it finds any (lookups.py); it is told that
its prefill leg has ended. Tokens after the last whole block are computed there. EngineCore thread only.
"""

import logging
from dataclasses import dataclass

from pdxfer.connector.chunks import PromptChunks, RankChunk
from pdxfer.connector.requests import tenant_of
from pdxfer.connector.saves import Saves
from pdxfer.connector.sends import Sends
from pdxfer.connector.transfer import Send

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Spill:
    """One prefill that waits for its grant."""

    send: Send
    chunks: list[RankChunk]
    tenant: str
    at: float
    """Monotonic seconds: when patience ends."""
    save_ids: list[int] | None = None
    """Of what had to be saved; None: not begun."""


class Spills:
    """All prefills without a grant."""

    def __init__(self, sends: Sends, saves: Saves, after_s: float) -> None:
        self._sends, self._saves, self._after_s = sends, saves, after_s
        self._waiting: dict[str, _Spill] = {}
        self.num_spilled = 0

    def request_over(self, send: Send, chunks: PromptChunks, now: float) -> None:
        """The prompt is computed and its request has ended."""
        if send.granted or send.ending:
            return
        tail = chunks.tail(send.num_tokens)
        whole = chunks.full(send.num_tokens) + ([tail] if tail is not None else [])
        if whole:
            self._waiting[send.transfer_id] = _Spill(send, whole, tenant_of(chunks.request), now + self._after_s)

    def check(self, now: float) -> None:
        """Each step: begin what is due, end what is stored."""
        for transfer_id, spill in list(self._waiting.items()):
            send = spill.send
            if send.granted or send.ending or send.is_settled:
                del self._waiting[transfer_id]
                self._saves.forget_spill(spill.save_ids or [])
            elif spill.save_ids is None:
                if now >= spill.at:
                    spill.save_ids = self._saves.spill(spill.chunks, send.held, spill.tenant)
            elif (stored := self._saves.spilled(spill.save_ids)) is not None:
                del self._waiting[transfer_id]
                self._end(send, stored)

    def _end(self, send: Send, stored: bool) -> None:
        if stored:
            self.num_spilled += 1
            self._sends.end(send, "no grant came: its KV is in the store")
        else:
            log.warning("%s: no grant came, and no tier has room for its KV; kept until the deadline", send.transfer_id)
