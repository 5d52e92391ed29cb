"""The grants that are out on one decode rank, and a bounded memory of those that are over.

The receiver adds, claims and counts; the revoker takes back.

Whoever reads or changes what may change of a grant (see Incoming) holds `changed`, and notifies it. No I/O.
"""

import threading
from collections import OrderedDict

import numpy as np

from pdxfer.node.incoming import Connections, Incoming
from pdxfer.node.staging_ring import Key
from pdxfer.wire.halves import Expect

MAX_ENDED = 4096


class Grants:
    """Live grants by (transfer, epoch); which ones were there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.live: dict[Key, Incoming] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Grants live={len(self.live)} ended={len(self._ended)}>"

    def add(self, expect: Expect, num_layers: int, connections: Connections) -> bool:
        """A new one. False: it is here, or was. `changed` held."""
        key = (expect.transfer_id, expect.epoch)
        if self.is_known(key):
            return False
        shape = (len(expect.block_ids), num_layers)
        self.live[key] = Incoming(expect, np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), connections)
        self.changed.notify_all()
        return True

    def is_known(self, key: Key) -> bool:
        """It is here, or was."""
        return key in self.live or key in self._ended

    def any_live(self) -> bool:
        """A unit may come."""
        with self.changed:
            return bool(self.live)

    def retire(self, incoming: Incoming) -> None:
        """It is over, well or not. `changed` held."""
        self.live.pop(incoming.key, None)
        self._ended[incoming.key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
