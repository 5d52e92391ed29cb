"""The verbs copy and move between nodes: this node takes values out of another's tiers into one of its own.

A value is checked when it has come, put, read back and checked again; only then, for a move, is the other node told to
delete it. So whatever fails, and however often it is repeated, no value is lost: at worst both nodes have it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from pdxfer.codec.frame import ForeignFrameError, FrameError
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import UnreachableError
from pdxfer.store.base import Entry
from pdxfer.store.lease import BufferPool, PooledBuffer
from pdxfer.store.manage import AT_ONCE, Progress, slots_of, soon
from pdxfer.store.manage_copy import KNOWN, Copied
from pdxfer.store.peer import wire
from pdxfer.store.peer.links import Link
from pdxfer.store.peer.session import PeerSession
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.slot import TierSlot
from pdxfer.store.tiered import TieredStore
from pdxfer.store.writing import HELD

CALL_S = 10.0
"""One value, or one page, from a peer."""
BUFFER_BYTES = 256 << 20
"""Values in flight."""
_HERE = ("done", "already")


class Pull:
    """One operation."""

    def __init__(self, store: TieredStore, link: Link, *, to_tier: str, from_tier: str) -> None:
        """Raises ConfigError for a tier that this store does not have."""
        [self._target] = slots_of(store, to_tier) if to_tier else slots_of(store, "?")
        self._store, self._link, self._from_tier = store, link, from_tier
        self._pool = BufferPool(BUFFER_BYTES)
        self._loop = asyncio.get_running_loop()

    async def run(self, progress: Progress, keys: Sequence[bytes], *, remove: bool) -> Copied:
        """Take them. UnreachableError, which says how far it came, when the other node is lost."""
        counts: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        try:
            for begin in range(0, len(keys), AT_ONCE):
                part = keys[begin : begin + AT_ONCE]
                said = await asyncio.gather(*(self._one(key) for key in part))
                for word in said:
                    (counts if word in KNOWN else failed)[word] += 1
                here = [key for key, word in zip(part, said, strict=True) if word in _HERE]
                if remove and here:
                    words = await self._moved(here)
                    counts.update(words)
                    if shared := words.count("kept_shared"):
                        failed["stays in memory that engines share there"] += shared
                progress(min(begin + AT_ONCE, len(keys)), len(keys))
        except ServerError as error:
            raise UnreachableError(
                f"{error}; of {len(keys)} chunks {counts['done']} were copied, {counts['already']} were here before, "
                f"{counts['removed']} are removed there: repeat it when the node is back"
            ) from error
        finally:
            self._pool.close()
        return Copied(
            done=counts["done"], already=counts["already"], missing=counts["missing"], foreign=counts["foreign"],
            removed=counts["removed"], kept_pinned=counts["kept_pinned"], failed=dict(failed),
        )  # fmt: skip

    async def listing(self) -> AsyncIterator[list[Entry]]:
        """What the other node has, page by page. Raises UnreachableError."""
        after = b""
        while True:
            try:
                page = await self._page(after)
            except ServerError as error:
                raise UnreachableError(f"{error}; what it holds is not known, so nothing was done") from error
            if page:
                yield page
            if len(page) < wire.MAX_KEYS or page[-1].key <= after:
                return
            after = page[-1].key

    async def _page(self, after: bytes) -> list[Entry]:
        end = SYSTEM_CLOCK.now() + CALL_S
        return await self._link.server.run(
            lambda session: PeerSession.of(session).page(after, wire.MAX_KEYS, self._from_tier), end
        )

    async def _one(self, key: bytes) -> str:
        """done, already, missing, foreign, or why it failed. Raises ServerError when the peer does not answer."""
        store, target = self._store, self._target
        if await store.reader.check(target, key, soon(store)) is not None:
            return "already"
        try:
            got = await self._take(key)
        except ServerError as error:
            if error.reason in (Reason.DAMAGED, Reason.BUSY) or error.clean:
                return error.reason.value
            raise
        if got is None:
            return "missing"
        buffer, value = got
        try:
            return await self._keep(target, key, buffer.view.toreadonly(), value.tenant)
        finally:
            buffer.give_back()

    async def _keep(self, target: TierSlot, key: bytes, frame: memoryview, tenant: str) -> str:
        store = self._store
        try:
            await store.workers.run(store.coder.check, frame, key)
        except ForeignFrameError:
            return "foreign"
        except FrameError:
            return "damaged"
        outcome = await store.writer.put_frame(target, key, frame, soon(store), tenant)
        if outcome not in HELD:
            return outcome.value
        is_there = await store.reader.check(target, key, soon(store)) is not None
        return "done" if is_there else "not readable afterwards"

    async def _take(self, key: bytes) -> tuple[PooledBuffer, wire.Value] | None:
        end = SYSTEM_CLOCK.now() + CALL_S
        return await self._link.server.run(
            lambda session: PeerSession.of(session).take(key, self._from_tier, self._lend), end, drop=_give_back
        )

    async def _moved(self, keys: Sequence[bytes]) -> list[str]:
        end = SYSTEM_CLOCK.now() + CALL_S
        return await self._link.server.run(
            lambda session: PeerSession.of(session).moved(keys, self._from_tier), end
        )  # fmt: skip

    def _lend(self, num_bytes: int) -> PooledBuffer:
        """Worker threads."""
        if not self._pool.fits(num_bytes):
            raise ServerError(Reason.DAMAGED, f"a value of {num_bytes} bytes is larger than {BUFFER_BYTES}")
        taking = asyncio.run_coroutine_threadsafe(self._pool.take(num_bytes, CALL_S), self._loop)
        buffer = taking.result()
        if buffer is None:
            raise ServerError(Reason.BUSY, "no buffer came back in time")
        return buffer


def _give_back(got: tuple[PooledBuffer, wire.Value] | None) -> None:
    if got is not None:
        got[0].give_back()
