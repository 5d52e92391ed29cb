"""The router's span of each traced request: from the proxy's question to our answer. The router's thread only."""

from collections import OrderedDict

from pdxfer.metrics.spans import Spans
from pdxfer.wire.messages import Busy, FromRouter, Local, Pair, Pairing

_MAX_ASKED = 4096


class PairSpans:
    """Remembers traced questions until they are answered; bounded."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._asked: OrderedDict[tuple[bytes, str], tuple[str, float]] = OrderedDict()

    def asked(self, route: bytes, pair: Pair, wall: float) -> None:
        """A proxy asks."""
        if pair.traceparent:
            self._asked[(route, pair.request_id)] = (pair.traceparent, wall)
            while len(self._asked) > _MAX_ASKED:
                self._asked.popitem(last=False)

    def answered(self, routes: tuple[bytes, ...], message: FromRouter, wall: float) -> None:
        """Something is sent; answers end spans."""
        if not isinstance(message, Pairing | Local | Busy):
            return
        for route in routes:
            found = self._asked.pop((route, message.request_id), None)
            if found is not None:
                self._spans.add(found[0], "router pair", found[1], wall, _attributes(message))


def _attributes(answer: Pairing | Local | Busy) -> dict[str, str]:
    named = {"pdxfer.answer": type(answer).__name__.lower()}
    if isinstance(answer, Pairing):
        named |= {"pdxfer.transfer_id": answer.transfer_id, "pdxfer.prefill": answer.prefill.engine_id}
    if isinstance(answer, Pairing | Local):
        return named | {"pdxfer.decode": answer.decode.engine_id}
    return named | {"pdxfer.reason": answer.reason}
