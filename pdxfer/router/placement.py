"""Answers each Pair once: Pairing, Local or Busy; now, or when capacity returns, or at its deadline."""

from collections.abc import Callable

from pdxfer.router.cluster import Cluster, Pairs
from pdxfer.router.leases import Lease, Leases
from pdxfer.router.members import Engine
from pdxfer.router.outbox import Outbox
from pdxfer.router.pairing import DecodeOffer, PrefillLoad, num_blocks_needed, pick_decode, pick_prefill
from pdxfer.router.settings import RouterSettings
from pdxfer.router.waiting import Key, Waiting, WaitingQueue
from pdxfer.wire.messages import ONE_BLOCK, PREFILL_TOO_SMALL, SHORT_PROMPT, Busy, Local, Pair, Pairing

_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 30.0
_STOPPING = "the router is shutting down"


class Placement:
    """The desk where proxies ask. `mint` makes transfer ids."""

    def __init__(
        self, settings: RouterSettings, cluster: Cluster, leases: Leases, out: Outbox, mint: Callable[[], str]
    ) -> None:
        self.queue = WaitingQueue(settings.max_queue)
        self.is_stopping = False
        self._settings = settings
        self._cluster = cluster
        self._leases = leases
        self._out = out
        self._mint = mint
        self._num_locals = 0
        self._kept: tuple[Key, str] | None = None
        """The oldest request, once too many have overtaken it, and the decode engine kept free for it."""

    def apply(self, settings: RouterSettings) -> None:
        """These settings from now on."""
        self._settings = settings
        self.queue.max_len = settings.max_queue

    def ask(self, route: bytes, pair: Pair, now: float) -> None:
        """A proxy wants a place for one request."""
        wait_s = min(pair.deadline_s, self._settings.max_wait_s) if pair.deadline_s > 0 else 0.0
        waiting = Waiting(proxy=route, pair=pair, since=now, deadline=now + wait_s)
        if waiting.key in self.queue:
            self._out.count("refused", "duplicate")
        elif self._try_place(waiting, now):
            self.queue.note_overtaken()
        elif self.is_stopping:
            self._busy(waiting, now, _STOPPING)
        elif (largest := self._too_small(pair)) is not None:
            self._local(waiting, largest, now, "larger than any decode engine", num_blocks=0)
        else:
            self._enqueue(waiting, now)

    def place_waiting(self, now: float) -> None:
        """Capacity may have come back."""
        self.queue.place(lambda waiting: self._try_place(waiting, now))

    def expire(self, now: float) -> None:
        """Answer those who waited long enough."""
        for waiting in self.queue.expired(now):
            self.queue.remove(waiting)
            self._busy(waiting, now, self._why_waiting(waiting.pair))

    def stop(self, now: float) -> None:
        """Answer everybody. Nobody is paired from now on: decode engines serve alone until another router is there."""
        self.is_stopping = True
        for waiting in self.queue:
            self.queue.remove(waiting)
            if not self._try_place(waiting, now):
                self._busy(waiting, now, _STOPPING)

    def withdraw(self, route: bytes, request_id: str) -> bool:
        """Nobody waits for this answer any more. False: no such request is in the queue."""
        waiting = self.queue.get((route, request_id))
        if waiting is not None:
            self.queue.remove(waiting)
        return waiting is not None

    def forget_proxy(self, route: bytes) -> None:
        """Nobody is there to be answered."""
        for waiting in self.queue:
            if waiting.proxy == route:
                self.queue.remove(waiting)

    def other_prefill(self, lease: Lease, num_missing_tokens: int) -> Engine | None:
        """Who could take a transfer over whose prefill is lost: not one that was tried, not for a short rest."""
        if self.is_stopping or num_missing_tokens < self._settings.min_remote_tokens:
            return None
        tried = {lease.prefill.engine_id, *lease.tried}
        for decode, partners in self._cluster.pairs(lease.model):
            if decode is lease.decode:
                return _pick_prefill([one for one in partners if one.engine_id not in tried], lease.num_tokens)
        return None

    # ---- deciding --------------------------------------------------------------------------------------------

    def _try_place(self, waiting: Waiting, now: float) -> bool:
        """Answer with a pair or a decode engine if one has the capacity."""
        pair = waiting.pair
        pairs = _without(pair.avoid, self._cluster.pairs(pair.model))
        wants_prefill, reason = self._wants_prefill(pair, pairs)
        kept = self._kept_free(waiting)
        offers = [
            DecodeOffer(decode.engine_id, decode.credit.available, _block_size(decode))
            for decode, partners in pairs
            if (partners or not wants_prefill) and decode.engine_id != kept
        ]
        decode_id = pick_decode(offers, pair.num_tokens)
        if decode_id is None:
            return False
        decode, partners = next(entry for entry in pairs if entry[0].engine_id == decode_id)
        if wants_prefill and pair.num_tokens <= _block_size(decode):
            wants_prefill, reason = False, ONE_BLOCK
        prefill = _pick_prefill(partners, pair.num_tokens) if wants_prefill else None
        if prefill is not None:
            self._pair(waiting, prefill, decode, now)
        else:
            self._local(waiting, decode, now, reason or PREFILL_TOO_SMALL)
        return True

    def _wants_prefill(self, pair: Pair, pairs: Pairs) -> tuple[bool, str]:
        """Whether to pair the request, else why not. What is missing comes before what its prompt does not need: the
        reason then says whether another one would be paired."""
        if self.is_stopping:
            return False, _STOPPING
        if pair.local_only:
            return False, "asked for a decode engine alone"
        if not any(partners for _, partners in pairs):
            return False, "no prefill engine is ready"
        if pair.num_tokens < self._settings.min_remote_tokens:
            return False, SHORT_PROMPT
        return True, ""

    def _kept_free(self, waiting: Waiting) -> str | None:
        """The decode engine that `waiting` must not take, because an older request has been overtaken too often."""
        oldest = self.queue.oldest
        if oldest is None or oldest.bypasses < self._settings.max_bypasses or oldest is waiting:
            return None
        pairs = _without(oldest.pair.avoid, self._cluster.pairs(oldest.pair.model))
        wants_prefill, _ = self._wants_prefill(oldest.pair, pairs)
        takes = [decode for decode, partners in pairs if partners or not wants_prefill]
        if self._kept is None or self._kept[0] != oldest.key or all(e.engine_id != self._kept[1] for e in takes):
            fitting = [
                DecodeOffer(decode.engine_id, decode.credit.available, _block_size(decode))
                for decode in takes
                if _fits(decode, oldest.pair, decode.credit.limit)
            ]
            best = max(fitting, key=lambda offer: (offer.credit_blocks, offer.engine_id), default=None)
            self._kept = (oldest.key, best.engine_id) if best is not None else None
        return self._kept[1] if self._kept is not None else None

    def _too_small(self, pair: Pair) -> Engine | None:
        """The largest decode engine if none could ever take the prompt: it says so itself, in its own words. One that
        is there, if any is."""
        decodes = [e for e in self._cluster.engines.values() if e.is_joined and e.can_decode and e.serves(pair.model)]
        if not decodes or any(_fits(decode, pair) for decode in decodes):
            return None
        is_there = [e for e in decodes if e.is_usable and e.engine_id not in pair.avoid]
        return max(is_there or decodes, key=lambda decode: _num_blocks(decode) * _block_size(decode))

    def _why_waiting(self, pair: Pair) -> str:
        pairs = self._cluster.pairs(pair.model)
        if not pairs:
            return f"no decode engine serves {pair.model!r}" if pair.model else "no decode engine is ready"
        if not any(_fits(decode, pair, decode.credit.limit) for decode, _ in pairs):
            return "the prompt is larger than the credit limit of every decode engine"
        return "no decode engine has enough free KV blocks"

    # ---- answering -------------------------------------------------------------------------------------------

    def _pair(self, waiting: Waiting, prefill: Engine, decode: Engine, now: float) -> None:
        pair, lease_s = waiting.pair, self._settings.lease_s
        lease = Lease(
            transfer_id=self._mint(), request_id=pair.request_id, proxy=waiting.proxy, prefill=prefill, decode=decode,
            num_tokens=pair.num_tokens, deadline=now + lease_s, model=pair.model,
        )  # fmt: skip
        self._leases.open(lease)
        self._out.flow(prefill.engine_id, decode.engine_id).num_live += 1
        decode.credit.reserve(lease.transfer_id, num_blocks_needed(pair.num_tokens, _block_size(decode)))
        prefill.outstanding_tokens += pair.num_tokens
        self._out.count("answers", "pairing")
        self._out.send(
            Pairing(
                request_id=pair.request_id, transfer_id=lease.transfer_id, prefill=prefill.ref, decode=decode.ref,
                lease_s=lease_s,
            ),
            waiting.proxy,
        )  # fmt: skip

    def _local(self, waiting: Waiting, decode: Engine, now: float, reason: str, num_blocks: int | None = None) -> None:
        """No lease: the engine's report includes it a heartbeat from now. It takes the blocks of its prompt, or
        `num_blocks`."""
        if num_blocks is None:
            num_blocks = num_blocks_needed(waiting.pair.num_tokens, _block_size(decode))
        self._num_locals += 1
        key = f"local-{self._num_locals}"
        decode.credit.reserve(key, num_blocks)
        decode.credit.settle(key, now + self._settings.heartbeat_s)
        self._out.count("answers", "local")
        self._out.send(Local(request_id=waiting.pair.request_id, decode=decode.ref, reason=reason), waiting.proxy)

    def _busy(self, waiting: Waiting, now: float, reason: str) -> None:
        """`retry_after_s`: as long as the oldest has waited, within bounds."""
        oldest = self.queue.oldest or waiting
        retry_after_s = min(_RETRY_MAX_S, max(_RETRY_MIN_S, now - oldest.since))
        self._out.count("answers", "busy")
        self._out.send(
            Busy(request_id=waiting.pair.request_id, retry_after_s=retry_after_s, reason=reason[:2048]), waiting.proxy
        )

    def _enqueue(self, waiting: Waiting, now: float) -> None:
        if not self._cluster.pairs(waiting.pair.model):
            waiting.deadline = min(waiting.deadline, now + self._settings.no_engine_wait_s)
        if waiting.deadline <= now:
            self._busy(waiting, now, self._why_waiting(waiting.pair))
            return
        crowded_out = self.queue.add(waiting)
        if crowded_out is not None:
            self._busy(crowded_out, now, f"{self._settings.max_queue} requests are waiting already")


def _without(avoid: list[str], pairs: Pairs) -> Pairs:
    """The pairs without engines that failed this request; all of them where nothing else is left."""
    if not avoid:
        return pairs
    others = [
        (decode, [prefill for prefill in partners if prefill.engine_id not in avoid])
        for decode, partners in pairs
        if decode.engine_id not in avoid
    ]
    return others or pairs


def _pick_prefill(partners: list[Engine], num_tokens: int) -> Engine | None:
    loads = [
        PrefillLoad(prefill.engine_id, prefill.outstanding_tokens, _num_blocks(prefill) * _block_size(prefill))
        for prefill in partners
    ]
    prefill_id = pick_prefill(loads, num_tokens)
    return next((prefill for prefill in partners if prefill.engine_id == prefill_id), None)


def _block_size(engine: Engine) -> int:
    assert engine.hello is not None
    return engine.hello.capacity.block_size


def _num_blocks(engine: Engine) -> int:
    assert engine.hello is not None
    return engine.hello.capacity.num_blocks


def _fits(decode: Engine, pair: Pair, limit: int | None = None) -> bool:
    """Whether it could ever take the prompt, within an operator's limit. vLLM keeps one block for itself."""
    most = _num_blocks(decode) - 1
    return num_blocks_needed(pair.num_tokens, _block_size(decode)) <= (most if limit is None else min(most, limit))
