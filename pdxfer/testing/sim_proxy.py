"""The simulated proxy with its clients: asks for a pair, drives both legs, replays once; each request ends once."""

from dataclasses import dataclass, field

from pdxfer.testing.sim_decode import SimDecode
from pdxfer.testing.sim_prefill import SimPrefill
from pdxfer.testing.sim_world import BEAT_S, Party, World
from pdxfer.wire.messages import (
    Busy,
    FromMember,
    FromRouter,
    Heartbeat,
    HeartbeatAck,
    LegFailed,
    Local,
    Pair,
    Pairing,
    ProxyHello,
    Redispatch,
    Release,
)

ASK_S, REQUEST_S, MAX_LEGS = 1.0, 4.0, 2


@dataclass(eq=False, slots=True)
class Asked:
    """One client's request."""

    request_id: str
    num_tokens: int
    pairing: Pairing | None = None
    prefill: SimPrefill | None = None
    epoch: int = 0
    """Of the prefill leg under way."""
    is_prefilling: bool = False
    decode: SimDecode | None = None
    leg_id: str = ""
    """Of the decode leg under way."""
    num_legs: int = 0
    ends: list[str] = field(default_factory=list)
    """How it ended: exactly one entry."""


class SimProxy(Party):
    """One proxy; its clients are told of its crash by their connections."""

    def __init__(self, world: World, prefills: list[SimPrefill], decodes: list[SimDecode]) -> None:
        super().__init__(world, "proxy")
        self.prefills = {prefill.name: prefill for prefill in prefills}
        self.decodes = {decode.name: decode for decode in decodes}
        self.asked: dict[str, Asked] = {}
        self._begin()

    def _begin(self) -> None:
        self.route = f"proxy/x#{self.life}".encode()
        self.world.members[self.route] = self
        self.send(ProxyHello(proxy_id="x"))
        self.world.at(BEAT_S, self, self.beat)

    def beat(self) -> None:
        """Report."""
        self.send(Heartbeat(incarnation=1, wall=self.world.clock.wall()))
        self.world.at(BEAT_S, self, self.beat)

    def send(self, message: FromMember) -> None:
        """To the router."""
        self.world.to_router(self, self.route, message)

    def crash(self, seconds: float) -> None:
        del self.world.members[self.route]
        for asked in self.asked.values():
            if not asked.ends:
                self._close_legs(asked)
                asked.ends.append("cut")
        super().crash(seconds)

    def restart(self) -> None:
        super().restart()
        self._begin()

    # ---- a request -------------------------------------------------------------------------------------------

    def ask(self, request_id: str, num_tokens: int) -> None:
        """A client's request came."""
        asked = self.asked[request_id] = Asked(request_id, num_tokens)
        if not self.is_alive:
            asked.ends.append("cut")
            return
        self.send(Pair(request_id=request_id, num_tokens=num_tokens, deadline_s=ASK_S))
        self.world.at(ASK_S, self, self._no_answer, asked)
        self.world.at(REQUEST_S, self, self._end, asked, "timeout")

    def abort(self, victim: int) -> None:
        """A client leaves."""
        open_ones = [asked for asked in self.asked.values() if not asked.ends]
        if open_ones and self.is_alive:
            self._end(open_ones[victim % len(open_ones)], "aborted")

    def told(self, route: bytes, message: FromRouter) -> None:
        if isinstance(message, HeartbeatAck):
            self.send(ProxyHello(proxy_id="x"))
        elif isinstance(message, Pairing | Local | Busy):
            self._answered(message)
        elif isinstance(message, Redispatch):
            self._redispatch(message)

    def _answered(self, answer: Pairing | Local | Busy) -> None:
        asked = self.asked.get(answer.request_id)
        if asked is None or asked.ends or asked.num_legs:
            is_ours = asked is not None and asked.pairing == answer
            if isinstance(answer, Pairing) and not is_ours:
                self.send(Release(transfer_id=answer.transfer_id, reason="nobody waits for this pairing any more"))
        elif isinstance(answer, Pairing):
            asked.pairing = answer
            self._post(asked, self.prefills[answer.prefill.engine_id], 1)
            self._decode(asked, self.decodes[answer.decode.engine_id], answer.transfer_id)
        elif isinstance(answer, Local):
            self._decode(asked, self.decodes[answer.decode.engine_id], "")
        else:
            self._end(asked, "busy")

    def _redispatch(self, message: Redispatch) -> None:
        """Decode has lost its prefill: another one."""
        transfer_id = message.transfer_id
        live = (one for one in self.asked.values() if one.pairing is not None and not one.ends)
        asked = next((one for one in live if one.pairing and one.pairing.transfer_id == transfer_id), None)
        if asked is None:
            failed = LegFailed(transfer_id=transfer_id, leg="prefill", reason="request over", epoch=message.epoch)
            self.send(failed)
        elif message.epoch > asked.epoch:
            self._close_prefill(asked)
            self._post(asked, self.prefills[message.prefill.engine_id], message.epoch)

    def _no_answer(self, asked: Asked) -> None:
        """The router is lost or slow: a decode engine alone."""
        if not asked.ends and not asked.num_legs:
            self._decode(asked, self._some_decode(None), "")

    def _some_decode(self, avoid: SimDecode | None) -> SimDecode:
        found = [one for one in self.decodes.values() if one.is_alive and one is not avoid]
        return self.world.rng.choice(found or list(self.decodes.values()))

    # ---- legs ------------------------------------------------------------------------------------------------

    def _post(self, asked: Asked, prefill: SimPrefill, epoch: int) -> None:
        assert asked.pairing is not None
        transfer_id = asked.pairing.transfer_id
        asked.prefill, asked.epoch, asked.is_prefilling = prefill, epoch, True

        def reply(ok: bool) -> None:
            self.world.in_order((self, "http", transfer_id, epoch), self, self._prefilled, asked, epoch, ok)

        if prefill.is_alive:
            call = (prefill.leg, asked.request_id, transfer_id, asked.num_tokens, reply)
            self.world.in_order(("http", transfer_id, epoch), prefill, *call)
            self.world.at(0.05, None, self._lost_on_the_way, prefill, prefill.life, reply)
        else:
            reply(False)

    def _decode(self, asked: Asked, decode: SimDecode, transfer_id: str) -> None:
        asked.num_legs += 1
        leg_id = asked.leg_id = f"{asked.request_id}.{asked.num_legs}"
        asked.decode = decode

        def reply(ok: bool) -> None:
            self.world.in_order((self, "http", leg_id), self, self._decoded, asked, leg_id, ok)

        if decode.is_alive:
            call = (decode.leg, asked.request_id, leg_id, transfer_id, asked.num_tokens, reply)
            self.world.in_order(("http", leg_id), decode, *call)
            self.world.at(0.05, None, self._lost_on_the_way, decode, decode.life, reply)
        else:
            reply(False)

    def _lost_on_the_way(self, engine: Party, life: int, reply: object) -> None:
        """The engine died before the request reached it: the connection is reset."""
        if engine.life != life:
            assert callable(reply)
            reply(False)

    def _prefilled(self, asked: Asked, epoch: int, ok: bool) -> None:
        if epoch != asked.epoch:
            return
        was_prefilling, asked.is_prefilling = asked.is_prefilling, False
        if was_prefilling and not ok and asked.pairing is not None and not asked.ends:
            self.send(LegFailed(transfer_id=asked.pairing.transfer_id, leg="prefill", reason="reset", epoch=epoch))

    def _decoded(self, asked: Asked, leg_id: str, ok: bool) -> None:
        if asked.ends or asked.leg_id != leg_id:
            return
        if ok:
            self._end(asked, "ok")
        elif asked.num_legs < MAX_LEGS:
            if asked.pairing is not None:
                self.send(LegFailed(transfer_id=asked.pairing.transfer_id, leg="decode", reason="reset"))
            self._decode(asked, self._some_decode(asked.decode), "")
        else:
            self._end(asked, "failed")

    def _end(self, asked: Asked, how: str) -> None:
        if asked.ends:
            return
        self.world.note(f"{asked.request_id}: {how}")
        asked.ends.append(how)
        self._close_legs(asked)
        if asked.pairing is not None:
            self.send(Release(transfer_id=asked.pairing.transfer_id, reason=how))

    def _close_legs(self, asked: Asked) -> None:
        """Engines notice closed connections; a leg that is still on its way is followed by its end."""
        if asked.decode is not None:
            self.world.in_order(("http", asked.leg_id), asked.decode, asked.decode.abort, asked.leg_id)
        self._close_prefill(asked)

    def _close_prefill(self, asked: Asked) -> None:
        if asked.pairing is not None and asked.prefill is not None and asked.is_prefilling:
            key = asked.pairing.transfer_id
            self.world.in_order(("http", key, asked.epoch), asked.prefill, asked.prefill.abort, key)
