"""How the infinistore tier connects, on a pretend client: no server, no library."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.remote import infinistore
from pdxfer.store.remote.infinistore import InfiniStoreSession
from pdxfer.store.remote.library import KeyLocks
from pdxfer.store.remote.url import Address

SLOW = 20.0


def test_connections_made_at_once_leave_the_process_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client prints while it connects, which is not shown; what others print afterwards is."""
    begun, ended = [threading.Event(), threading.Event()], threading.Event()

    class Connection:
        """The second one outlives the first, if they are made at the same time."""

        def __init__(self, config: Any) -> None:
            pass

        def connect(self) -> None:
            print("connecting")
            number = int(begun[0].is_set())
            begun[number].set()
            if number:
                assert ended.wait(SLOW)
            else:
                begun[1].wait(0.1)

    library = SimpleNamespace(ClientConfig=lambda **settings: settings, TYPE_TCP="tcp", InfinityConnection=Connection)
    monkeypatch.setattr(infinistore, "Stream", lambda address, end: SimpleNamespace(close=lambda: None))
    output, one_at_a_time, locks = sys.stdout, threading.Lock(), KeyLocks()

    def connect() -> None:
        end = SYSTEM_CLOCK.now() + SLOW
        InfiniStoreSession(library, Address(host="h", port=1), "p:", locks, one_at_a_time, end)

    threads = [threading.Thread(target=connect) for _ in range(2)]
    threads[0].start()
    assert begun[0].wait(SLOW)
    threads[1].start()
    threads[0].join(SLOW)
    ended.set()
    threads[1].join(SLOW)
    assert begun[1].is_set() and sys.stdout is output
