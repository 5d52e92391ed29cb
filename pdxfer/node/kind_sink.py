"""What an endpoint of the node calls: its arrivals go to the receiver with the endpoint's kind, its controls to the
sender or to the receiver, whomever they concern. Called on the endpoint's threads."""

from pdxfer.kv.runs import Runs
from pdxfer.node.receiver import Receiver
from pdxfer.node.sender import Sender
from pdxfer.transport.base import Abort, Control, Credit, PeerId, UnitFailed, UnitHeader


class KindSink:
    """The Sink of one endpoint."""

    def __init__(self, receiver: Receiver, sender: Sender, kind: str) -> None:
        self._receiver, self._sender, self._kind = receiver, sender, kind

    @property
    def generation(self) -> int:
        return self._receiver.generation

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        return self._receiver.claim(peer, header, self._kind)

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        return self._receiver.arrived(peer, header)

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        self._receiver.failed(peer, header, reason)

    def control(self, peer: PeerId, control: Control) -> None:
        if isinstance(control, Abort):
            self._sender.abort(peer.engine_id, control.transfer_id, control.epoch, control.reason)
        elif isinstance(control, Credit):
            self._sender.hear(peer.engine_id, control)
        elif isinstance(control, UnitFailed) and not self._receiver.expects(control.header):
            header = control.header
            if header.frame_bytes:
                self._sender.hear(peer.engine_id, control)
            self._sender.abort(peer.engine_id, header.transfer_id, header.epoch, control.reason)
        else:
            self._receiver.control(peer, control)

    def lost(self, peer: PeerId, reason: str) -> None:
        self._receiver.lost(peer, reason, self._kind)
