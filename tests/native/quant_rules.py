"""The rules of csrc/kernels.h for weights in few bits, in numpy: slow, literal, and sharing nothing with the kernels.

What a file holds comes from the gguf package as it dequantises. Whole numbers, scales and minima are found by letting
it dequantise the same codes with scales of one and zero.
"""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from octavo.weights.quants import TYPES
from tests.native.kernel_rules import F32, Floats

CHUNK = 32
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
OFFSET = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32, "IQ4_NL": 128, "IQ4_XS": 128, "int8": 128}
GROUP = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}
MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # formats that the gguf package can quantise to


class Grouped(NamedTuple):
    """A weight [n, k]: whole numbers q = u - offset, and for each group a scale and a minimum."""

    whole: NDArray[np.int64]  # [n, k]
    scale: Floats  # [n, groups]
    minimum: Floats  # [n, groups]; zeros where the format has none
    group: int


def stored(format: str, w: Floats, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of a format: `w` quantised by the gguf package where it can, else random bytes with small scales."""
    kind = TYPES[format]
    if format in WRITTEN:
        return gguf.quants.quantize(w, gguf.GGMLQuantizationType[format])
    n, k = w.shape
    blocks = rng.integers(0, 256, (n * k // kind.block, kind.nbytes), np.uint8)
    records = blocks.view(kind.record).reshape(-1)
    for field in {"d", "m", "dmin"} & set(kind.record.names):
        records[field] = rng.normal(0, 0.01, len(records))
    return blocks.reshape(n, -1)


def dequantized(format: str, raw: NDArray[np.uint8]) -> Floats:
    """By the gguf package."""
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format]).astype(F32)


def grouped(format: str, raw: NDArray[np.uint8]) -> Grouped:
    """Solves each group's numbers for its scale and minimum: what is left is whole, and small.

    Takes the numbers of the same bytes with d and m or dmin of one, where every step is exact.
    """
    kind, group = TYPES[format], GROUP.get(format, 32)
    n = len(raw)
    records = np.ascontiguousarray(raw).reshape(-1, kind.nbytes).view(kind.record).reshape(-1)

    def with_scales(**values: float) -> Floats:
        copy = records.copy()
        for field, value in values.items():
            copy[field] = value
        return dequantized(format, copy.view(np.uint8).reshape(n, -1)).reshape(n, -1, group)

    low = {"Q4_1": "m", "Q5_1": "m", "Q2_K": "dmin", "Q4_K": "dmin", "Q5_K": "dmin"}.get(format)
    plain = with_scales(d=1, **({low: 0} if low else {}))  # scale of the group times whole numbers
    units = _units(format, records, n)
    whole = np.where(units[:, :, None] == 0, 0, plain / np.where(units == 0, 1, units)[:, :, None])
    per_record = kind.block // group
    d = np.repeat(records["d"].astype(F32).reshape(n, -1), per_record, axis=1)
    minimum = np.zeros_like(units)
    if low:
        steps = with_scales(d=0, **{low: 1})[:, :, 0]
        minimum = np.repeat(records[low].astype(F32).reshape(n, -1), per_record, axis=1) * steps
    assert (whole == np.rint(whole)).all()
    return Grouped(whole.reshape(n, -1).astype(np.int64), d * units, minimum, group)


def _units(format: str, records: NDArray[np.void], n: int) -> Floats:
    """The small whole scales of super-blocks, [n, groups]: read from all-equal codes; ones for blocks of 32."""
    kind, group = TYPES[format], GROUP.get(format, 32)
    if kind.block == 32:
        return np.ones((n, len(records) // n), F32)
    copy = records.copy()
    zeros = {"Q2_K": ["dmin"], "Q4_K": ["dmin"], "Q5_K": ["dmin"]}.get(format, [])
    for field in zeros:
        copy[field] = 0
    copy["d"] = 1
    # Codes that stand for one: q = 1, or with an offset q = -1 from code offset - 1, and so on.
    if format in ("Q2_K",):
        copy["qs"] = 0b01010101
    elif format in ("Q4_K", "Q5_K"):
        copy["qs"] = 0x11
        if format == "Q5_K":
            copy["qh"] = 0
    elif format == "Q3_K":
        copy["qs"], copy["hmask"] = 0b01010101, 0xFF  # 4 + 1 - 4
    elif format == "Q6_K":
        copy["ql"], copy["qh"] = 0x11, 0b10101010  # 32 + 1 - 32
    elif format == "IQ4_XS":
        copy["qs"] = 0x88  # the ninth value is 1
    return dequantized(format, copy.view(np.uint8).reshape(n, -1)).reshape(n, -1, group)[:, :, 0]


class Activations(NamedTuple):
    codes: NDArray[np.int64]  # [rows, k]
    scale: Floats  # [rows, chunks]


LARGEST = {"int8": F32(127), "int16": F32(127 * 128)}


def quantized_rows(x: Floats, dtype: str) -> Activations:
    """Each 32 numbers of a row as whole numbers up to LARGEST and a scale."""
    chunks = x.reshape(len(x), -1, CHUNK)
    largest = np.abs(chunks).max(-1)
    small = largest < 2.0**-100
    inverse = np.where(small, F32(0), LARGEST[dtype] / np.where(small, F32(1), largest)).astype(F32)
    scale = np.where(small, F32(0), largest / LARGEST[dtype]).astype(F32)
    return Activations(np.rint(chunks * inverse[:, :, None]).astype(np.int64).reshape(x.shape), scale)


def whole_product(a: Activations, w: Grouped) -> Floats:
    """[rows, n] by the rule for int8 and int16 activations; sums are of 64-bit integers."""
    rows, n = len(a.codes), len(w.whole)
    acc = np.zeros((rows, n), F32)
    for g in range(w.scale.shape[1]):
        k = slice(g * w.group, (g + 1) * w.group)
        total = a.codes[:, k] @ w.whole[:, k].T
        assert np.abs(total).max() < 2**27
        s = a.scale[:, g * w.group // CHUNK, None]
        acc = acc + (w.scale[None, :, g] * s) * total.astype(F32)
        if w.minimum.any():
            acc = acc + w.minimum[None, :, g] * (s * a.codes[:, k].sum(1)[:, None].astype(F32))
    return acc


def kept_product(x: Floats, w: Grouped) -> Floats:
    """[rows, n] by the rule for bfloat16 activations."""
    acc = np.zeros((len(x), len(w.whole)), F32)
    for g in range(w.scale.shape[1]):
        even, odd = np.zeros_like(acc), np.zeros_like(acc)
        sums = [np.zeros((len(x), 1), F32), np.zeros((len(x), 1), F32)]
        for k in range(g * w.group, (g + 1) * w.group):
            product = x[:, k, None] * w.whole[None, :, k].astype(F32)
            sums[k % 2] = sums[k % 2] + x[:, k, None]
            if k % 2 == 0:
                even = even + product
            else:
                odd = odd + product
        acc = acc + w.scale[None, :, g] * (even + odd)
        if w.minimum.any():
            acc = acc + w.minimum[None, :, g] * (sums[0] + sums[1])
    return acc
