"""Messages about one transfer, from the leg that sent them to whom they concern, and the end of each lease.

Every relay checks that the sender is that leg of a live lease; anything else is dropped and counted. A lease ends once,
by what comes first: Ended, Release, a lost decode, or its deadline. The proxy hears of each end it did not cause.
"""

from collections.abc import Callable

from pdxfer.router.credits import REPORT_LAG_S
from pdxfer.router.leases import Lease, Leases
from pdxfer.router.members import Engine, Link
from pdxfer.router.outbox import Outbox
from pdxfer.wire.messages import (
    CancelGrant,
    Ended,
    Grant,
    LegFailed,
    Outcome,
    Redispatch,
    Release,
    Resume,
    Stamp,
    Started,
)

OtherPrefill = Callable[[Lease, int], Engine | None]
"""(lease, missing tokens) → who could take the prompt over."""
ProxyOffset = Callable[[bytes], float]
"""Connection of a proxy → our wall clock − its own."""


class Relay:
    """The transfers' side of the router state."""

    def __init__(
        self, leases: Leases, lease_s: float, out: Outbox, other_prefill: OtherPrefill, proxy_offset: ProxyOffset
    ) -> None:
        self._leases = leases
        self._other_prefill = other_prefill
        self._proxy_offset = proxy_offset
        self.lease_s = lease_s
        self._out = out

    # ---- from engines ----------------------------------------------------------------------------------------

    def started(self, sender: Engine, message: Started, now: float) -> None:
        """prefill → decode: time to grant. Who comes too late (it was lost, and is back) is told that no grant will
        come, so that it does not hold the prompt until its deadline."""
        lease = self._lease_of(message.transfer_id, prefill=sender)
        if lease is None or lease.is_prefill_lost:
            known = self._leases.get(message.transfer_id)
            if known is None or known.decode is not sender:
                late = CancelGrant(transfer_id=message.transfer_id, reason="nobody waits for this prompt any more")
                self._to_all_of(sender, late)
            return
        self._leases.renew(lease, now + self.lease_s)
        relayed = Started(
            transfer_id=message.transfer_id, num_tokens=message.num_tokens, prefill_id=sender.engine_id,
            epoch=lease.attempt,
        )  # fmt: skip
        self._out.send_link(lease.decode.sched, relayed)

    def grant(self, sender: Engine, message: Grant, now: float) -> None:
        """decode → prefill, workers first: permission to fill blocks."""
        lease = self._lease_of(message.transfer_id, decode=sender)
        if lease is None:
            return
        if message.decode_id != sender.engine_id or message.decode_incarnation != sender.incarnation:
            self._out.count("refused", "foreign")
        elif message.epoch != lease.attempt or lease.is_prefill_lost:
            self._out.count("refused", "stale")
        else:
            if message.epoch > lease.epoch:
                self._leases.renew(lease, now + self.lease_s)
            lease.epoch = message.epoch
            sender.credit.settle(message.transfer_id, now + REPORT_LAG_S)
            self._out.num_grants += 1
            self._to_prefill(lease, message)

    def cancel_grant(self, sender: Engine, message: CancelGrant) -> None:
        """decode → prefill: nothing (more) is wanted. The lease goes on until Ended."""
        lease = self._lease_of(message.transfer_id, decode=sender)
        if lease is None:
            return
        if message.epoch == lease.attempt:
            self._to_prefill(lease, message)
        else:
            self._out.count("refused", "stale")

    def resume(self, sender: Engine, link: Link, message: Resume) -> None:
        """decode has lost its prefill and fenced it: move the pairing to another one, or say that there is none."""
        lease = self._lease_of(message.transfer_id, decode=sender)
        if lease is not None and message.epoch != lease.attempt + 1:
            self._out.count("refused", "stale")
            return
        prefill = self._other_prefill(lease, message.num_missing_tokens) if lease is not None else None
        if lease is None or prefill is None:
            reason = "the pairing has ended" if lease is None else "no other prefill engine for so much is ready"
            failed = LegFailed(
                transfer_id=message.transfer_id, leg="prefill", reason=f"{message.reason}; {reason}"[:2048],
                epoch=message.epoch,
            )  # fmt: skip
            self._out.send(failed, link.route)
            return
        before = lease.prefill
        self._out.happened(
            "resumed", transfer_id=lease.transfer_id, prefill=prefill.engine_id, before=before.engine_id,
            decode=sender.engine_id, tokens=str(message.num_missing_tokens), reason=message.reason[:200],
        )  # fmt: skip
        self._to_prefill(lease, CancelGrant(transfer_id=lease.transfer_id, reason="resumed by another prefill engine"))
        _return_tokens(lease)
        self._leases.move(lease, prefill)
        prefill.outstanding_tokens += lease.num_tokens
        flow = self._out.flow(before.engine_id, sender.engine_id)
        flow.num_live, flow.num_failed = max(0, flow.num_live - 1), flow.num_failed + 1
        self._out.flow(prefill.engine_id, sender.engine_id).num_live += 1
        self._out.send(
            Redispatch(
                transfer_id=lease.transfer_id, epoch=lease.attempt, prefill=prefill.ref,
                first_missing=message.first_missing, reason=message.reason,
            ),
            lease.proxy,
        )  # fmt: skip

    def leg_failed(self, sender: Engine, message: LegFailed, now: float) -> None:
        """An engine gives its own leg up."""
        if message.leg == "prefill":
            lease = self._lease_of(message.transfer_id, prefill=sender)
        else:
            lease = self._lease_of(message.transfer_id, decode=sender)
        if lease is not None:
            self._fail_leg(lease, message, now, tell_proxy=True)

    def stamp(self, sender: Engine, link: Link, message: Stamp) -> None:
        """Engine → proxy, in the proxy's clock. The last stages may come after the end."""
        lease = self._leases.get(message.transfer_id) or self._leases.get_ended(message.transfer_id)
        if lease is None or sender not in (lease.prefill, lease.decode):
            self._out.count("refused", "late" if lease is None else "foreign")
            return
        if message.stage == "prefilled" and sender is lease.prefill:
            _return_tokens(lease)
        wall = message.wall + (link.clock_offset or 0.0) - self._proxy_offset(lease.proxy)
        self._out.send(Stamp(transfer_id=message.transfer_id, stage=message.stage, wall=wall), lease.proxy)

    def ended(self, sender: Engine, message: Ended, now: float) -> None:
        """decode settled its side: lease and credit return. One that a Release overtook still tells what was moved."""
        over = self._leases.get_ended(message.transfer_id)
        if over is not None and over.decode is sender and not over.is_proxy_told:
            over.is_proxy_told = True
            self._out.send(message, over.proxy)
            return
        lease = self._lease_of(message.transfer_id, decode=sender)
        if lease is not None:
            self._out.num_tokens += max(0, message.num_tokens)
            self._out.num_bytes += max(0, message.num_bytes)
            self._end(lease, message, now)

    # ---- from the proxy --------------------------------------------------------------------------------------

    def proxy_leg_failed(self, route: bytes, message: LegFailed, now: float) -> None:
        """The proxy saw a leg fail."""
        lease = self._lease_of_proxy(message.transfer_id, route)
        if lease is None:
            return
        if message.leg == "prefill" and message.epoch != lease.attempt:
            self._out.count("refused", "stale")
            return
        self._fail_leg(lease, message, now, tell_proxy=False)

    def release(self, route: bytes, message: Release, now: float) -> None:
        """The proxy is done with it."""
        lease = self._lease_of_proxy(message.transfer_id, route)
        if lease is not None:
            self.give_up(lease, f"released by its proxy: {message.reason}", now, tell_proxy=False)

    # ---- from the router itself ------------------------------------------------------------------------------

    def engine_lost(self, engine: Engine, reason: str, now: float) -> None:
        """An engine is suspect or gone: its transfers go on without it."""
        for lease in self._leases.of_engine(engine.engine_id):
            if lease.decode is engine:
                failed = LegFailed(transfer_id=lease.transfer_id, leg="decode", reason=reason[:2048])
                self._wait_no_more(lease, reason)
                self._fail_leg(lease, failed, now, tell_proxy=True)
            elif lease.prefill is engine and not lease.is_prefill_lost:
                self._fail_leg(lease, _prefill_failed(lease, reason), now, tell_proxy=True)

    def expire(self, now: float) -> None:
        """End leases whose deadline has passed."""
        for lease in self._leases.expired(now):
            self._out.happened("lease_expired", transfer_id=lease.transfer_id)
            self.give_up(lease, "the lease expired", now, tell_proxy=True)

    def give_up(self, lease: Lease, reason: str, now: float, *, tell_proxy: bool) -> None:
        """End a lease that no engine ended; both legs are told to wait no more."""
        self._to_prefill(lease, CancelGrant(transfer_id=lease.transfer_id, reason=reason[:2048]))
        self._wait_no_more(lease, reason)
        self._end(lease, _no_delivery(lease, "failed" if tell_proxy else "aborted", reason), now, tell_proxy=tell_proxy)

    # ---- parts -----------------------------------------------------------------------------------------------

    def _fail_leg(self, lease: Lease, failed: LegFailed, now: float, *, tell_proxy: bool) -> None:
        """Tell the other leg. Without prefill decode recomputes and ends it; without decode it is over."""
        if tell_proxy:
            self._out.send(failed, lease.proxy)
        if failed.leg == "prefill":
            lease.is_prefill_lost = True
            _return_tokens(lease)
            self._out.send_link(lease.decode.sched, _prefill_failed(lease, failed.reason))
        else:
            self._out.send_link(lease.prefill.sched, failed)
            self._end(lease, _no_delivery(lease, "failed", failed.reason), now)

    def _end(self, lease: Lease, ended: Ended, now: float, *, tell_proxy: bool = True) -> None:
        self._leases.end(lease.transfer_id)
        _return_tokens(lease)
        if lease.epoch < 0:
            lease.decode.credit.release(lease.transfer_id)
        else:
            lease.decode.credit.settle(lease.transfer_id, now + REPORT_LAG_S)
        self._out.count("ended", ended.outcome)
        flow = self._out.flow(lease.prefill.engine_id, lease.decode.engine_id)
        flow.num_live = max(0, flow.num_live - 1)
        flow.num_ended += 1
        flow.num_bytes += max(0, ended.num_bytes)
        if ended.outcome == "failed":
            flow.num_failed += 1
            self._out.happened(
                "fell_back", transfer_id=lease.transfer_id, prefill=lease.prefill.engine_id,
                decode=lease.decode.engine_id, reason=ended.reason[:200],
            )  # fmt: skip
        if tell_proxy:
            lease.is_proxy_told = True
            self._out.send(ended, lease.proxy)

    def _to_prefill(self, lease: Lease, message: Grant | CancelGrant) -> None:
        self._to_all_of(lease.prefill, message)

    def _to_all_of(self, engine: Engine, message: Grant | CancelGrant) -> None:
        """Workers first."""
        routes = engine.worker_routes
        if engine.sched is not None:
            routes = (*routes, engine.sched.route)
        self._out.send(message, *routes)

    def _wait_no_more(self, lease: Lease, reason: str) -> None:
        self._out.send_link(lease.decode.sched, _prefill_failed(lease, reason))

    def _lease_of(
        self, transfer_id: str, *, prefill: Engine | None = None, decode: Engine | None = None
    ) -> Lease | None:
        lease = self._leases.get(transfer_id)
        if lease is None:
            self._out.count("refused", "late")
            return None
        if (prefill is not None and lease.prefill is not prefill) or (
            decode is not None and lease.decode is not decode
        ):
            self._out.count("refused", "foreign")
            return None
        return lease

    def _lease_of_proxy(self, transfer_id: str, route: bytes) -> Lease | None:
        lease = self._leases.get(transfer_id)
        if lease is not None and lease.proxy == route:
            return lease
        self._out.count("refused", "late" if lease is None else "foreign")
        return None


def _return_tokens(lease: Lease) -> None:
    """The prompt is no load for its prefill engine any more."""
    if not lease.is_prefill_over:
        lease.is_prefill_over = True
        lease.prefill.outstanding_tokens -= lease.num_tokens


def _prefill_failed(lease: Lease, reason: str) -> LegFailed:
    """Of the attempt under way."""
    return LegFailed(transfer_id=lease.transfer_id, leg="prefill", reason=reason[:2048], epoch=lease.attempt)


def _no_delivery(lease: Lease, outcome: Outcome, reason: str) -> Ended:
    return Ended(
        transfer_id=lease.transfer_id, outcome=outcome, num_tokens=0, num_bytes=0, num_units=0, channel="",
        reason=reason[:2048],
    )  # fmt: skip
