"""A TCP proxy that misbehaves on demand: freezes, cuts, drips. Threads of its own, so it never shares a test's loop."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Literal, Self

Mode = Literal["pass", "freeze", "slow", "cut"]
DRIP_BYTES, DRIP_S = 100, 0.1
"""1 kB/s in each direction of each connection."""


class FaultyProxy:
    """Forwards a port of loopback to another."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._mode: Mode = "pass"
        self._left: int | None = None
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="faulty-proxy")]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set(self, mode: Mode) -> None:
        """`freeze` holds everything back, `slow` lets 1 kB/s pass, `cut` ends all connections, also new ones."""
        with self._changed:
            self._mode = mode
            self._changed.notify_all()
        if mode == "cut":
            self._end_all()

    def hold_after(self, num_bytes: int) -> None:
        """The server gets so many more bytes and not one more; its answers pass. Until `cut`."""
        with self._changed:
            self._left = num_bytes

    def close(self) -> None:
        """End; idempotent."""
        self.set("cut")
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10.0)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._mode == "cut":
                    raise ConnectionResetError
                server = socket.create_connection(("127.0.0.1", self._target), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=(source, sink, sink is server), name="faulty-proxy")
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                while data:
                    data = data[self._forward(sink, data, to_server) :]
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
        self._open.discard(source)

    def _forward(self, sink: socket.socket, data: bytes, to_server: bool) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._mode != "freeze")
            if self._mode == "slow":
                data = data[:DRIP_BYTES]
                self._changed.wait(DRIP_S)
            if to_server and self._left is not None:
                self._changed.wait_for(lambda: self._left or self._mode == "cut")
                data = data[: self._left]
                self._left -= len(data)
        if self._mode == "cut":
            raise ConnectionResetError
        sink.sendall(data)
        return len(data)

    def _end_all(self) -> None:
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
