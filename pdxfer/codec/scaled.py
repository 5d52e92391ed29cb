"""What int8, fp8 and int4 share: a payload of exact tokens, parameters and codes, and units kept raw.

A unit (a row, or a tile of tokens) that holds inf or NaN, or spans more than float32 can hold, is kept as it is. A
payload that would not be shorter than the values holds the values. Little-endian:

    0 coded (0: values follow)   1 exact tokens   2 zero (2)   4 number of raw units
    8 exact tokens [L, 2, H, exact, D] · parameters · codes · raw units' numbers (u32) · their values
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pdxfer.codec.arrays import contiguous, empty_beside, host, put
from pdxfer.codec.base import ITEM_BYTES, Bytes, ChunkSpec, Encoded, Shape, Tables, check_shape, check_version
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.codec.kernels import DTYPE_NUMBERS, Kernels, Words, best
from pdxfer.core.errors import ConfigError

_HEAD = struct.Struct("<BBHI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How long the parts of a payload are for values of one shape."""

    params: int
    """Parameters, 2 bytes each."""
    codes: int
    """Bytes of codes."""
    units: int
    """Units that can be bad."""


class ScaledCodec:
    """Base of codecs that quantise units with their own scale. Subclasses give names, layout and loops."""

    name: ClassVar[str]
    version: ClassVar[int]
    lossless = False
    opaque = False

    def __init__(self, level: int = 0, tables: Tables | None = None, kernels: Kernels | None = None) -> None:
        if level != 0:
            raise ConfigError(f"codec {self.name} has no level {level}; use 0")
        self._kernels = kernels or best()

    # ---- of the subclass -------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> Layout:
        """Lengths for values of `shape`."""
        raise NotImplementedError

    def encode_units(self, values: Bytes, shape: Shape, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """Fill all three from canonical values."""
        raise NotImplementedError

    def decode_units(self, codes: Bytes, params: Words, shape: Shape, dtype: int, out: Bytes) -> None:
        """Canonical values back."""
        raise NotImplementedError

    def unit(self, values: Bytes, shape: Shape, item: int, number: int) -> Bytes:
        """View of one unit's bytes in canonical values."""
        raise NotImplementedError

    # ---- Codec -----------------------------------------------------------------------------------------------------

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """One pass over the values; one more copy of the first chunk of a context."""
        if spec.dtype not in DTYPE_NUMBERS:
            raise ConfigError(
                f"codec {self.name} takes {', '.join(DTYPE_NUMBERS)}, not {spec.dtype}; keep such KV raw or lossless"
            )
        exact = spec.exact_tokens
        shape, body = _without(values, spec.shape, ITEM_BYTES[spec.dtype], exact)
        layout = self.layout(shape)
        first = host(values[:0] if exact == 0 else _first(values, spec.shape, ITEM_BYTES[spec.dtype], exact))
        codes_at = _HEAD.size + first.nbytes + 2 * layout.params
        payload = np.empty(codes_at + layout.codes, dtype=np.uint8)
        params, bad = payload[_HEAD.size + first.nbytes : codes_at], np.zeros(layout.units, dtype=np.uint8)
        if layout.units:
            number = DTYPE_NUMBERS[spec.dtype]
            self.encode_units(body, shape, number, params.view(np.uint16), payload[codes_at:], bad)
        raw = np.flatnonzero(bad).astype(np.uint32)
        kept = self._raw_units(body, shape, ITEM_BYTES[spec.dtype], raw, values.nbytes - payload.nbytes)
        if kept is None:
            return self._encoded(np.concatenate((np.zeros(_HEAD.size, dtype=np.uint8), host(values))))
        payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(1, exact, 0, raw.size), dtype=np.uint8)
        payload[_HEAD.size : _HEAD.size + first.nbytes] = first
        return self._encoded(np.concatenate((payload, raw.view(np.uint8), *kept)) if raw.size else payload)

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """One pass into `out`; one more copy of the first chunk of a context."""
        check_version(header, self.name, self.version)
        check_shape(header, out)
        number = DTYPE_NUMBERS.get(header.dtype)
        if number is None or header.level:
            raise FrameError(f"{self.name} payload of dtype {header.dtype}, level {header.level}")
        data = np.frombuffer(payload, dtype=np.uint8)
        if data.nbytes < _HEAD.size:
            raise FrameError(f"{self.name} payload of {data.nbytes} bytes is cut")
        coded, exact, _, num_raw = _HEAD.unpack(payload[: _HEAD.size])
        if not coded:
            if data.nbytes != _HEAD.size + out.nbytes:
                raise FrameError(f"{self.name} payload of {data.nbytes} bytes should hold {out.nbytes} of values")
            put(out, data[_HEAD.size :])
            return
        item, shape = ITEM_BYTES[header.dtype], header.shape
        if exact > shape[3]:
            raise FrameError(f"{self.name} payload says {exact} exact tokens of {shape[3]}")
        body_shape = (*shape[:3], shape[3] - exact, shape[4])
        layout = self.layout(body_shape)
        first_bytes = shape[0] * 2 * shape[2] * exact * shape[4] * item
        params_at = _HEAD.size + first_bytes
        codes_at = params_at + 2 * layout.params
        raw_at = codes_at + layout.codes
        if data.nbytes < raw_at + 4 * num_raw or num_raw > layout.units:
            raise FrameError(f"{self.name} payload of {data.nbytes} bytes for {shape}, {num_raw} raw units, is cut")
        body = out if exact == 0 else empty_beside(out, out.nbytes - first_bytes)
        if layout.units:
            params = data[params_at:codes_at].view(np.uint16)
            self.decode_units(data[codes_at:raw_at], params, body_shape, number, body)
        self._restore(data[raw_at:], num_raw, body, body_shape, item, layout.units)
        if exact:
            whole = out.reshape(*shape[:4], shape[4] * item)
            put(whole[:, :, :, :exact], data[_HEAD.size : params_at])
            whole[:, :, :, exact:] = body.reshape(*body_shape[:4], shape[4] * item)

    def _encoded(self, payload: Bytes) -> Encoded:
        return Encoded(payload=payload.data, codec=self.name, codec_version=self.version, level=0)

    def _raw_units(
        self, body: Bytes, shape: Shape, item: int, raw: npt.NDArray[np.uint32], room: int
    ) -> list[Bytes] | None:
        """The raw units' values; None if all would be no shorter than the values themselves."""
        kept, used = [], 4 * raw.size
        for number in raw.tolist():
            kept.append(host(self.unit(body, shape, item, number)))
            used += kept[-1].nbytes
            if used >= room:
                return None
        return kept if used < room else None

    def _restore(self, tail: Bytes, num_raw: int, body: Bytes, shape: Shape, item: int, units: int) -> None:
        """Put raw units where they belong."""
        at = 4 * num_raw
        for number in tail[:at].view(np.uint32).tolist():
            if number >= units:
                raise FrameError(f"{self.name} payload names raw unit {number} of {units}")
            unit = self.unit(body, shape, item, number)
            if at + unit.nbytes > tail.nbytes:
                raise FrameError(f"{self.name} payload is cut in its raw units")
            put(unit, tail[at : at + unit.nbytes])
            at += unit.nbytes
        if at != tail.nbytes:
            raise FrameError(f"{self.name} payload has {tail.nbytes - at} bytes too many")


def _first(values: Bytes, shape: Shape, item: int, exact: int) -> Bytes:
    """A copy of the first tokens' values."""
    found: Bytes = contiguous(values.reshape(*shape[:4], shape[4] * item)[:, :, :, :exact])
    return found


def _without(values: Bytes, shape: Shape, item: int, exact: int) -> tuple[Shape, Bytes]:
    """Shape and values without the first tokens; a copy unless there are none."""
    if exact == 0:
        return shape, values
    rest = contiguous(values.reshape(*shape[:4], shape[4] * item)[:, :, :, exact:])
    return (shape[0], shape[1], shape[2], shape[3] - exact, shape[4]), rest
