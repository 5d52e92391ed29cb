"""The least a client of each server can do: the reference of the store bench. No identity, checksum, deadline or retry.

Redis and memcached: one blocking socket that sends values in pieces of the size our tiers use, all SETs before their
answers, all GETs before their bodies, received into the caller's buffer. Clouds: opendal's write and readinto, bare.
"""

import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pdxfer.config.store import TierConfig
from pdxfer.store.remote.cloud import CloudTier, load_opendal, operator_settings
from pdxfer.store.remote.pieces import PIECE_BYTES
from pdxfer.store.remote.tier import COMMON
from pdxfer.store.remote.url import RemoteUrl, parse_url


class RawClient(Protocol):
    """Put and get of one value; the caller's buffer is as long as the value."""

    def put(self, key: bytes, value: memoryview) -> None: ...

    def get(self, key: bytes, into: memoryview) -> None: ...

    def delete(self, key: bytes, num_bytes: int) -> None: ...

    def close(self) -> None: ...


class RawSocket:
    """What both protocols need: vectors out, lines and bodies in."""

    def __init__(self, url: str, port: int) -> None:
        address = parse_url(TierConfig(url=url), COMMON, port).addresses[0]
        self._socket = socket.create_connection((address.host, address.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def send(self, *parts: bytes | memoryview) -> None:
        """All of the parts, gathered."""
        views = [memoryview(part) for part in parts]
        while views:
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def line(self) -> bytes:
        """Up to CR LF; what came with it is kept for the body."""
        while b"\r\n" not in self._held:
            self._held += self._socket.recv(4096)
        line, _, self._held = self._held.partition(b"\r\n")
        return line

    def body(self, into: memoryview) -> None:
        """A body and its CR LF."""
        kept = min(len(self._held), len(into))
        into[:kept] = self._held[:kept]
        self._held = self._held[kept:]
        into = into[kept:]
        while into:
            into = into[self._socket.recv_into(into, len(into), socket.MSG_WAITALL) :]
        assert self.line() == b""


def _pieces(key: bytes, value: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    for number, begin in enumerate(range(0, len(value), PIECE_BYTES)):
        yield b"%s:%d" % (key, number), value[begin : begin + PIECE_BYTES]


class RawRedis(RawSocket):
    """SET and GET."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 6379)

    def put(self, key: bytes, value: memoryview) -> None:
        """All pieces, then all answers."""
        names = list(_pieces(key, value))
        for name, piece in names:
            self.send(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(piece)), piece, b"\r\n")
        assert all([self.line() == b"+OK" for _ in names])

    def get(self, key: bytes, into: memoryview) -> None:
        """All questions, then all bodies."""
        names = list(_pieces(key, into))
        self.send(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name, _ in names))
        for _, piece in names:
            assert int(self.line()[1:]) == len(piece)
            self.body(piece)

    def delete(self, key: bytes, num_bytes: int) -> None:
        """All pieces."""
        names = [name for name, _ in _pieces(key, memoryview(bytes(num_bytes)))]
        self.send(b"".join(b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names))
        for _ in names:
            self.line()


class RawMemcached(RawSocket):
    """ms and mg."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 11211)

    def put(self, key: bytes, value: memoryview) -> None:
        """All pieces, then all answers."""
        names = list(_pieces(key, value))
        for name, piece in names:
            self.send(b"ms %s %d\r\n" % (name, len(piece)), piece, b"\r\n")
        assert all([self.line() == b"HD" for _ in names])

    def get(self, key: bytes, into: memoryview) -> None:
        """All questions, then all bodies."""
        names = list(_pieces(key, into))
        self.send(b"".join(b"mg %s v\r\n" % name for name, _ in names))
        for _, piece in names:
            assert int(self.line().split()[1]) == len(piece)
            self.body(piece)

    def delete(self, key: bytes, num_bytes: int) -> None:
        """All pieces."""
        names = [name for name, _ in _pieces(key, memoryview(bytes(num_bytes)))]
        self.send(b"".join(b"md %s\r\n" % name for name in names))
        for _ in names:
            self.line()


class RawCloud:
    """opendal's blocking operator."""

    def __init__(self, url: str) -> None:
        where: RemoteUrl = parse_url(TierConfig(url=url), (*COMMON, *CloudTier.settings))
        service, settings = operator_settings(where)
        self._operator: Any = load_opendal().Operator(service, **settings)

    def put(self, key: bytes, value: memoryview) -> None:
        """One object."""
        self._operator.write(key.decode(), value)

    def get(self, key: bytes, into: memoryview) -> None:
        """Into the caller's buffer."""
        with self._operator.open(key.decode(), "rb") as file:
            while into:
                into = into[file.readinto(into) :]

    def delete(self, key: bytes, num_bytes: int) -> None:
        """The object."""
        self._operator.delete(key.decode())

    def close(self) -> None:
        """Nothing to end."""


RAW: dict[str, Callable[[str], RawClient]] = {
    "redis": RawRedis,
    "memcached": RawMemcached,
    "s3": RawCloud,
    "gs": RawCloud,
    "az": RawCloud,
}
"""Kind of tier → its least client, made from the tier's URL."""
