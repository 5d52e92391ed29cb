"""Framing of the data channel's byte stream (tcp, local): preamble, then frames with bounded lengths.

Both ends send the preamble first. A frame is a fixed head (type, meta length, payload length), msgpack meta, and for
units on tcp the KV bytes in canonical order. Lengths are checked before anything is allocated. Payloads are sent from
and received into the caller's memory; nothing is copied in user space.

    preamble  4s magic "PDXD", u16 version            head  u8 type, 3 zero bytes, u32 meta bytes, u64 payload bytes

2026-11-29: version 1, first release. Version 2: units may be codec frames, and receivers send credits for them.
2026-11-30: version 3. Credits name the codecs that are decoded there, and how fast prompts are computed there.
"""

import enum
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdxfer.core.errors import ChannelError, ProtocolError
from pdxfer.transport.vectors import IOV_MAX, Iovecs, receive, send, skip

MAGIC = b"PDXD"
VERSION = 3
PREAMBLE = struct.Struct("<4sH")
HEAD = struct.Struct("<B3xIQ")
MAX_META_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 32
_SCRATCH_BYTES = 1 << 18
_TIMEVAL = struct.Struct("ll")


class FrameType(enum.IntEnum):
    """What a frame is; the comment says what its meta holds."""

    HELLO = 1  # handshake.Hello
    PROOF = 2  # 32 bytes
    REFUSED = 3  # text: why the other side will not talk to us
    CARD = 4  # local: where the sender's memory can be read
    UNIT = 5  # base.UnitHeader; payload: its bytes (tcp) or none (local)
    CONTROL = 6  # base.Control
    PROBE = 7  # any few bytes
    PROBED = 8  # the same bytes
    RESULT = 9  # local: text, empty = the oldest unit in flight was read and verified, else why not


@dataclass(frozen=True, slots=True)
class Head:
    """A frame's fixed part."""

    type: FrameType
    meta_bytes: int
    payload_bytes: int


def pack_head(kind: FrameType, meta_bytes: int, payload_bytes: int) -> bytes:
    """A frame's head. Asserts our own bounds."""
    assert meta_bytes <= MAX_META_BYTES and payload_bytes <= MAX_PAYLOAD_BYTES, (kind, meta_bytes, payload_bytes)
    return HEAD.pack(kind, meta_bytes, payload_bytes)


def unpack_head(data: bytes | bytearray) -> Head:
    """Check and name a head. Raises ProtocolError."""
    number, meta_bytes, payload_bytes = HEAD.unpack(data)
    try:
        kind = FrameType(number)
    except ValueError as error:
        raise ProtocolError(f"frame of unknown type {number}") from error
    if meta_bytes > MAX_META_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"{kind.name} frame announces {meta_bytes} + {payload_bytes} bytes; "
            f"allowed are {MAX_META_BYTES} + {MAX_PAYLOAD_BYTES}"
        )
    if payload_bytes and kind is not FrameType.UNIT:
        raise ProtocolError(f"{kind.name} frame with a payload of {payload_bytes} bytes")
    return Head(kind, meta_bytes, payload_bytes)


def check_preamble(data: bytes | bytearray) -> None:
    """Raise ProtocolError unless the other side speaks our version."""
    magic, version = PREAMBLE.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a pdxfer data channel: it begins with {bytes(data)!r}; is the port right?")
    if version != VERSION:
        raise ProtocolError(
            f"data channel version {version}, this side speaks {VERSION}: run the same pdxfer release on both sides"
        )


class FrameSocket:
    """Frames over one stream socket. One thread receives; any thread sends (a frame is sent whole).

    `timeout_s` is how long the other side may take no byte, or stop in mid-frame, before ChannelError.
    Waiting for the next frame has no limit of its own; `close` ends it.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock, self._timeout_s = sock, timeout_s
        self._sending = threading.Lock()
        self._closing = False
        self._handshaking = True
        self._scratch: memoryview | None = None
        self.num_sent_bytes = 0
        self.num_received_bytes = 0
        sock.setblocking(True)
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time without progress that is allowed."""
        self._timeout_s = timeout_s
        value = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    @property
    def closing(self) -> bool:
        """`cut` or `close` was called here."""
        return self._closing

    # ---- sending ---------------------------------------------------------------------------------------------------

    def send_preamble(self) -> None:
        """First bytes of a connection."""
        self._send([memoryview(PREAMBLE.pack(MAGIC, VERSION))])

    def send(self, kind: FrameType, meta: bytes = b"", payload: Sequence[memoryview] = ()) -> None:
        """One frame; returns when the kernel has taken every byte. Raises ChannelError."""
        num_bytes = sum(len(view) for view in payload)
        self._send([memoryview(pack_head(kind, len(meta), num_bytes) + meta), *payload])

    def send_vectors(self, kind: FrameType, meta: bytes, vectors: Iovecs) -> None:
        """As `send`, with the payload as ranges of memory that stays valid until this returns."""
        head = np.frombuffer(pack_head(kind, len(meta), int(vectors[:, 1].sum())) + meta, dtype=np.uint8)
        rest = np.concatenate((np.array([[head.ctypes.data, head.size]], dtype=np.uint64), vectors))
        with self._sending:
            while len(rest):
                sent = self._sent(lambda rest=rest: send(self.sock.fileno(), rest))  # type: ignore[misc]
                rest = skip(rest, sent)

    def _send(self, views: list[memoryview]) -> None:
        with self._sending:
            while views:
                sent = self._sent(lambda views=views: self.sock.sendmsg(views[:IOV_MAX]))  # type: ignore[misc]
                views = _advance(views, sent)

    def _sent(self, call: Callable[[], int]) -> int:
        """Bytes the kernel took in one call."""
        if self._closing:
            raise ChannelError("the connection was closed here")
        try:
            sent = call()
        except BlockingIOError as error:
            raise ChannelError(f"the peer took no byte for {self._timeout_s:g} s") from error
        except OSError as error:
            raise ChannelError(f"the connection broke while sending: {error}") from error
        self.num_sent_bytes += sent
        return sent

    # ---- receiving -------------------------------------------------------------------------------------------------

    def receive_preamble(self) -> None:
        """Read and check the other side's preamble."""
        check_preamble(self._exactly(PREAMBLE.size))

    def receive_head(self) -> Head:
        """Wait for the next frame's head."""
        return unpack_head(self._exactly(HEAD.size, may_idle=not self._handshaking))

    def handshaken(self) -> None:
        """The other side is known: from now on the wait for its next frame has no limit."""
        self._handshaking = False

    def receive_meta(self, head: Head, limit: int = MAX_META_BYTES) -> bytes:
        """The frame's meta. Raises ProtocolError if it is longer than `limit`."""
        if head.meta_bytes > limit:
            raise ProtocolError(f"{head.type.name} frame with {head.meta_bytes} bytes of meta; allowed here: {limit}")
        return bytes(self._exactly(head.meta_bytes))

    def receive_into(self, views: list[memoryview]) -> None:
        """Fill the views in order. Raises ChannelError when the stream ends, stalls or is cut."""
        while views:
            received = self._receive(views[:IOV_MAX])
            if received == 0:
                raise ChannelError(f"the peer sent no byte for {self._timeout_s:g} s in mid-frame")
            views = _advance(views, received)

    def receive_vectors(self, vectors: Iovecs) -> None:
        """As `receive_into`, for ranges of memory."""
        while len(vectors):
            received = self._received(lambda v=vectors: receive(self.sock.fileno(), v))  # type: ignore[misc]
            if received == 0:
                raise ChannelError(f"the peer sent no byte for {self._timeout_s:g} s in mid-frame")
            vectors = skip(vectors, received)

    def discard(self, num_bytes: int) -> None:
        """Read and drop."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while num_bytes:
            part = min(num_bytes, _SCRATCH_BYTES)
            self.receive_into([self._scratch[:part]])
            num_bytes -= part

    def _exactly(self, num_bytes: int, may_idle: bool = False) -> bytearray:
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            received = self._receive([view[at:]])
            if received == 0 and not (may_idle and at == 0):
                raise ChannelError(f"the peer sent no byte for {self._timeout_s:g} s")
            at += received
        return data

    def _receive(self, views: list[memoryview]) -> int:
        return self._received(lambda: self.sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])

    def _received(self, call: Callable[[], int]) -> int:
        """Bytes of one receive call; 0 when the timeout passed without a byte."""
        if self._closing:
            raise ChannelError("the connection was closed here")
        try:
            received = call()
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelError(f"the connection broke while receiving: {error}") from error
        if received == 0:
            raise ChannelError("the connection was closed here" if self._closing else "the peer closed the connection")
        self.num_received_bytes += received
        return received

    # ---- ending ----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Make every call on this socket, also those under way, end soon. Any thread; idempotent."""
        self._closing = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def close(self) -> None:
        """Release the descriptor. Only when no thread receives any more."""
        self.cut()
        with self._sending:
            self.sock.close()


def _advance(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` after `num_bytes`."""
    index = 0
    while index < len(views) and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    rest = views[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
