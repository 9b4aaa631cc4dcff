"""The formats that weights are stored in, and how each becomes float32.

A quantised row is a run of fixed-size blocks; a block holds its values as small integers beside the scales that turn
them into numbers. The record types below are the blocks byte by byte, as ggml lays them out (`ggml-common.h` of
ggml-org/ggml); fields are little-endian. For instance Q4_1, 32 values in 20 bytes:

    byte   0    2    4                                  20
           | d  | m  | qs: 16 bytes                     |
                       qs[i] & 15 is value i, qs[i] >> 4 is value i + 16;  x = d * q + m
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Records = NDArray[np.void]  # [n] blocks; a field of w bytes reads as [n, w]
Decoder = Callable[[Any, Floats], None]  # (Records [n], out [n, block]): fills out

_CHUNK_VALUES = 1 << 17  # values decoded at once: temporaries stay in the L2 cache and memory stays flat


class TensorType(NamedTuple):
    """One storage format. `decode` is None where octavo knows the size of the format but not how to read it."""

    name: str
    ggml_id: int | None  # the number that GGUF files use; None for formats that only safetensors has
    block: int  # values per block; a row is a whole number of blocks
    nbytes: int  # bytes per block
    decode: Decoder | None = None
    record: Any = None  # numpy dtype of one block


def dequantize(raw: Bytes, dtype: str) -> Floats:
    """Turn stored bytes into numbers.

    Args:
        raw: uint8, any shape; the last axis is a whole number of blocks.
        dtype: the name of a row of `TYPES`.

    Returns:
        float32, shaped as `raw` with the last axis counted in values. For F32 a view of `raw`, otherwise new memory.

    Raises:
        ModelError: octavo cannot read this format.
    """
    kind = TYPES[dtype]
    shape = (*raw.shape[:-1], raw.shape[-1] // kind.nbytes * kind.block)
    if kind.name == "F32":
        return raw.view("<f4")
    if kind.decode is None:
        raise ModelError(f"weights of type {dtype} are not supported; supported: {', '.join(SUPPORTED)}")
    blocks = np.ascontiguousarray(raw).reshape(-1).view(kind.record)
    out = np.empty((len(blocks), kind.block), np.float32)
    step = _CHUNK_VALUES // kind.block
    for start in range(0, len(blocks), step):
        kind.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


# ---- plain formats ---------------------------------------------------------------------------------------------------


def _f16(x: Any, out: Floats) -> None:
    out[:] = x[:, None]


def _bf16(x: Any, out: Floats) -> None:
    out.view(np.uint32)[:, 0] = x  # a bfloat16 is the upper half of a float32
    out.view(np.uint32)[:] <<= 16


# ---- blocks of 32 ----------------------------------------------------------------------------------------------------

_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])

# The sixteen values of the non-linear 4-bit formats IQ4_NL and IQ4_XS.
_NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _column(x: Any) -> Floats:
    """[n] half floats -> [n, 1] float32."""
    return x.astype(np.float32)[:, None]  # type: ignore[no-any-return]


def _nibbles(qs: Bytes) -> Bytes:
    """[n, w] bytes -> [n, 2, w]: all low halves, then all high halves."""
    return np.stack((qs & 15, qs >> 4), axis=1)


def _bits(qh: Bytes) -> Bytes:
    """[n, w] bytes -> [n, 8 w] single bits, lowest first."""
    return np.unpackbits(qh, axis=1, bitorder="little")


def _q4_0(x: Any, out: Floats) -> None:
    out[:] = _nibbles(x["qs"]).reshape(-1, 32)
    out -= 8
    out *= _column(x["d"])


def _q4_1(x: Any, out: Floats) -> None:
    out[:] = _nibbles(x["qs"]).reshape(-1, 32)
    out *= _column(x["d"])
    out += _column(x["m"])


def _q5_0(x: Any, out: Floats) -> None:
    out[:] = _nibbles(x["qs"]).reshape(-1, 32) | (_bits(x["qh"]) << 4)
    out -= 16
    out *= _column(x["d"])


def _q5_1(x: Any, out: Floats) -> None:
    out[:] = _nibbles(x["qs"]).reshape(-1, 32) | (_bits(x["qh"]) << 4)
    out *= _column(x["d"])
    out += _column(x["m"])


def _q8_0(x: Any, out: Floats) -> None:
    out[:] = x["qs"]
    out *= _column(x["d"])


def _iq4_nl(x: Any, out: Floats) -> None:
    out[:] = _NON_LINEAR[_nibbles(x["qs"])].reshape(-1, 32)
    out *= _column(x["d"])


# ---- super-blocks of 256: groups of 16 or 32 values with small integer scales of their own --------------------------

_Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
_Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
_IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

_BIT_PLANES = np.arange(8, dtype=np.uint8)[:, None]  # shifts that bring each bit of a byte down, plane by plane
_PAIR_PLANES = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # likewise for each pair of bits


def _pairs(qs: Bytes) -> Bytes:
    """[n, 32 h] bytes -> [n, 128 h] two-bit values: each run of 32 bytes holds four planes of 32 values."""
    return ((qs.reshape(len(qs), -1, 1, 32) >> _PAIR_PLANES) & np.uint8(3)).reshape(len(qs), -1)


def _planes(qh: Bytes) -> Bytes:
    """[n, 32] bytes -> [n, 8, 32] single bits: bit g of byte i belongs to value i of group g."""
    return (qh[:, None, :] >> _BIT_PLANES) & np.uint8(1)


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[n, 12] bytes -> eight 6-bit scales and eight 6-bit minima, each [n, 8], of Q4_K and Q5_K.

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 minima 0-3; bytes 8-11 hold the low four bits of scales
    4-7 and, above them, of minima 4-7, whose upper two bits are the spare top bits of bytes 0-3 and 4-7.
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=1)
    minima = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=1)
    return scales, minima


def _q2_k(x: Any, out: Floats) -> None:
    groups = out.reshape(-1, 16, 16)
    groups[:] = _pairs(x["qs"]).reshape(-1, 16, 16)
    groups *= (_column(x["d"]) * (x["scales"] & 15))[:, :, None]
    groups -= (_column(x["dmin"]) * (x["scales"] >> 4))[:, :, None]


def _q3_k(x: Any, out: Floats) -> None:
    low, high = x["scales"][:, :8], x["scales"][:, 8:]
    upper = ((high[:, None, :] >> _PAIR_PLANES) & 3).reshape(-1, 16)
    scales = (_nibbles(low).reshape(-1, 16) | (upper << 4)).astype(np.float32) - 32
    groups = out.reshape(-1, 16, 16)
    groups[:] = (_pairs(x["qs"]) | (_planes(x["hmask"]).reshape(-1, 256) << 2)).reshape(-1, 16, 16)
    groups -= 4
    groups *= (_column(x["d"]) * scales)[:, :, None]


def _q4_k(x: Any, out: Floats) -> None:
    scales, minima = _scales_and_minima(x["scales"])
    groups = out.reshape(-1, 8, 32)
    groups[:] = _nibbles(x["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    groups *= (_column(x["d"]) * scales)[:, :, None]
    groups -= (_column(x["dmin"]) * minima)[:, :, None]


def _q5_k(x: Any, out: Floats) -> None:
    scales, minima = _scales_and_minima(x["scales"])
    groups = out.reshape(-1, 8, 32)
    groups[:] = _nibbles(x["qs"].reshape(-1, 32)).reshape(-1, 8, 32) | (_planes(x["qh"]) << 4)
    groups *= (_column(x["d"]) * scales)[:, :, None]
    groups -= (_column(x["dmin"]) * minima)[:, :, None]


def _q6_k(x: Any, out: Floats) -> None:
    low = _nibbles(x["ql"].reshape(-1, 64)).reshape(-1, 256)  # each half of 128 values: 64 low, then 64 high nibbles
    groups = out.reshape(-1, 16, 16)
    groups[:] = (low | (_pairs(x["qh"]) << 4)).reshape(-1, 16, 16)
    groups -= 32
    groups *= (_column(x["d"]) * x["scales"])[:, :, None]


def _iq4_xs(x: Any, out: Floats) -> None:
    low = np.stack((x["scales_l"] & 15, x["scales_l"] >> 4), axis=2).reshape(-1, 8)
    high = (x["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low | (high << 4)).astype(np.float32) - 32
    groups = out.reshape(-1, 8, 32)
    groups[:] = _NON_LINEAR[_nibbles(x["qs"].reshape(-1, 16))].reshape(-1, 8, 32)
    groups *= (_column(x["d"]) * scales)[:, :, None]


# ---- the table -------------------------------------------------------------------------------------------------------

_ALL = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2, _f16, np.dtype("<f2")),
    TensorType("BF16", 30, 1, 2, _bf16, np.dtype("<u2")),
    TensorType("Q4_0", 2, 32, 18, _q4_0, _Q4_0),
    TensorType("Q4_1", 3, 32, 20, _q4_1, _Q4_1),
    TensorType("Q5_0", 6, 32, 22, _q5_0, _Q5_0),
    TensorType("Q5_1", 7, 32, 24, _q5_1, _Q5_1),
    TensorType("Q8_0", 8, 32, 34, _q8_0, _Q8_0),
    TensorType("Q2_K", 10, 256, 84, _q2_k, _Q2_K),
    TensorType("Q3_K", 11, 256, 110, _q3_k, _Q3_K),
    TensorType("Q4_K", 12, 256, 144, _q4_k, _Q4_K),
    TensorType("Q5_K", 13, 256, 176, _q5_k, _Q5_K),
    TensorType("Q6_K", 14, 256, 210, _q6_k, _Q6_K),
    TensorType("IQ4_NL", 20, 32, 18, _iq4_nl, _Q4_0),  # same bytes as Q4_0
    TensorType("IQ4_XS", 23, 256, 136, _iq4_xs, _IQ4_XS),
    # Known by name and size, so that a refusal can name them and tensors that no model uses do no harm.
    TensorType("Q8_1", 9, 32, 40),
    TensorType("Q8_K", 15, 256, 292),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("I8", 24, 1, 1),
    TensorType("I16", 25, 1, 2),
    TensorType("I32", 26, 1, 4),
    TensorType("I64", 27, 1, 8),
    TensorType("F64", 28, 1, 8),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("TQ1_0", 34, 256, 54),
    TensorType("TQ2_0", 35, 256, 66),
    TensorType("MXFP4", 39, 32, 17),
    TensorType("BOOL", None, 1, 1),
    TensorType("U8", None, 1, 1),
    TensorType("U16", None, 1, 2),
    TensorType("U32", None, 1, 4),
    TensorType("U64", None, 1, 8),
    TensorType("F8_E4M3", None, 1, 1),
    TensorType("F8_E5M2", None, 1, 1),
    TensorType("F8_E8M0", None, 1, 1),
)

TYPES: dict[str, TensorType] = {kind.name: kind for kind in _ALL}
TYPES_BY_GGML_ID: dict[int, TensorType] = {kind.ggml_id: kind for kind in _ALL if kind.ggml_id is not None}
SUPPORTED: tuple[str, ...] = tuple(kind.name for kind in _ALL if kind.name == "F32" or kind.decode is not None)
