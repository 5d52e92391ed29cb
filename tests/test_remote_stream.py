"""Connections to servers of a store: what is said when the deadline comes first."""

import socket
from collections.abc import Callable, Iterator

import pytest

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.stream import Stream
from pdxfer.store.remote.url import Address


@pytest.fixture
def stream() -> Iterator[Stream]:
    """To a server that never reads and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        made = Stream(Address(host=host, port=port), SYSTEM_CLOCK.now() + 10.0)
        yield made
        made.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda stream, end: stream.line(end),
        lambda stream, end: stream.take(4, end),
        lambda stream, end: stream.fill(memoryview(bytearray(1 << 16)), end),
    ],
    ids=["line", "take", "fill"],
)
def test_a_frozen_server_is_said_not_to_answer(stream: Stream, call: Callable[[Stream, float], object]) -> None:
    """Not in the kernel's words, which are of a resource that is temporarily unavailable."""
    with pytest.raises(ServerError) as failed:
        call(stream, SYSTEM_CLOCK.now() + 0.05)
    assert failed.value.reason is Reason.TIMEOUT
    assert "unavailable" not in str(failed.value)
    assert str(stream.address) in str(failed.value) and "in time" in str(failed.value)
