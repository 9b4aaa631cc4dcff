"""Weights in few bits: packing loses nothing, and products are the rules of csrc/kernels.h, bit for bit on every table.

Weights are written by the gguf package where it can write a format, and dequantised by it; what the kernels give is
held against numpy's integers (the same bits) and against float64 products of the dequantised weight (a bound that
follows from rounding alone).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo._native import fast_table, kernels, quant
from tests.native import kernel_rules as rules
from tests.native import quant_rules
from tests.native.kernel_rules import F32, Bits, Floats
from tests.native.quant_rules import FORMATS, MINIMA, dequantized, grouped, stored
from tests.native.test_kernels import POISON, activations, cuts, normal, up

TABLES = [*kernels.tables(), *sorted({fast_table(table) for table in kernels.tables()} - set(kernels.tables()))]
UNIT = 2.0**-24
HALF = 0.504  # of a step, and three roundings of a number of up to 127 * 128 steps
DTYPES = ("int8", "int16", "bfloat16")  # of activations
each_format = pytest.mark.parametrize("format", FORMATS)


def packed(format: str, raw: NDArray[np.uint8], k: int) -> NDArray[np.uint8]:
    out = np.full(quant.packed_bytes(format, len(raw), k), 0xA5, np.uint8)
    quant.pack_stored(format, raw, out)
    return out


def weight(format: str, n: int, k: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(rows as stored, packed)."""
    rng = np.random.default_rng(seed)
    raw = stored(format, normal(rng, n, k, scale=0.05), rng)
    return raw, packed(format, raw, k)


def product(
    table: str, format: str, x: Bits, w: NDArray[np.uint8], n: int, k: int, dtype: str, **ranges: object
) -> Floats:
    out = np.full((len(x), n), np.nan, F32)
    quant.matmul(table, format, x, w, n, k, dtype, out_float=out, out_width=n, **ranges)
    return out


@each_format
@pytest.mark.parametrize("n", [16, 37])
def test_packing_loses_nothing(format: str, n: int) -> None:
    raw, w = weight(format, n, 512, seed=1)
    found = np.full((n, 512), np.nan, F32)
    quant.unpack(format, w, found)
    np.testing.assert_array_equal(found, dequantized(format, raw))


def test_gate_and_up_take_turns() -> None:
    (gate, gate_alone), (up_, up_alone) = weight("Q4_1", 48, 64, 1), weight("Q4_1", 48, 64, 2)
    both = np.zeros(2 * len(gate_alone), np.uint8)
    for first, raw in enumerate((gate, up_)):
        quant.pack_stored("Q4_1", raw, both, first, 2)
    panels = both.reshape(6, -1)
    np.testing.assert_array_equal(panels[0::2].reshape(-1), gate_alone)
    np.testing.assert_array_equal(panels[1::2].reshape(-1), up_alone)


def test_a_file_width_is_kept() -> None:
    """Bits a weight: the file's, but that small scales of super-blocks take bytes, and 2 and 3 bits of code nibbles."""
    found = {format: quant.packed_bytes(format, 64, 1024) * 8 / (64 * 1024) for format in FORMATS}
    assert found == {
        "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "IQ4_NL": 4.5,
        "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_XS": 4.3125,
    }  # fmt: skip


# ---- activations


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_activations_become_whole_numbers(table: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = normal(rng, 9, 160) * np.exp2(rng.integers(-20, 20, (9, 160))).astype(F32)
    x = rules.rounded(x)
    x[1, 32:64] = 0
    x[2, 64:96] = 2.0**-101
    x[4, :32] = np.where(np.arange(32) == 5, 254, np.arange(32) * 2 + 1)  # in int8 all halves: to even
    bytes_each, largest = (1, 127) if dtype == "int8" else (2, 127 * 128)
    chunks = 5 * bytes_each
    codes, scale = np.zeros((9, 32 * chunks), np.int8), np.zeros((9, chunks), F32)
    initial, sums = np.zeros((9, chunks, 2), np.int32), np.zeros((9, chunks, 2), F32)
    quant.quantize(table, "Q4_0", activations(x), 160, dtype, codes, scale, initial, sums)
    want = quant_rules.quantized_rows(x, dtype)
    parts = codes.reshape(9, 5, bytes_each, 32).astype(np.int64)
    whole = parts[:, :, 0] if dtype == "int8" else parts[:, :, 0] * 128 + parts[:, :, 1]
    np.testing.assert_array_equal(whole.reshape(9, 160), want.codes)
    np.testing.assert_array_equal(scale[:, ::bytes_each], want.scale)
    assert np.abs(want.codes).max() == largest
    np.testing.assert_array_equal(initial.reshape(9, 5, bytes_each, 2)[..., 0], -8 * parts.sum(-1))
    total = want.codes.reshape(9, 5, 32).sum(-1)
    np.testing.assert_array_equal(sums[:, ::bytes_each, 0], want.scale * total.astype(F32))
    # The bound that the tests of products build on: half a step, and what inverse and product round.
    error = np.abs(want.codes * np.repeat(want.scale, 32, axis=1).astype(np.float64) - x)
    step = np.repeat(np.abs(x).reshape(9, 5, 32).max(-1), 32, axis=1) / largest
    assert (error <= np.maximum(step * HALF, 2.0**-100)).all()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(table: str, bad: float) -> None:
    _, w = weight("Q4_1", 16, 96, 4)
    x = normal(np.random.default_rng(5), 3, 96)
    x[1, 50] = bad
    for dtype in DTYPES:
        found = product(table, "Q4_1", activations(x), w, 16, 96, dtype)
        assert np.isfinite(found[[0, 2]]).all()
        assert not np.isfinite(found[1]).any()


# ---- products


@each_format
@settings(max_examples=6, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 40), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 20))
def test_products_are_the_rule_and_near_float64(format: str, m: int, n: int, blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = blocks * (256 if format.endswith(("_K", "_XS")) else 32)
    raw, w = weight(format, n, k, seed)
    x = normal(rng, m, k, scale=2)
    numbers, groups = dequantized(format, raw).astype(np.float64), grouped(format, raw)
    exact = x.astype(np.float64) @ numbers.T
    # Each activation is off by at most half a step (and a little: see above). In float32, S * s and the sum round, and
    # their product, then the addition: for each of the terms, 4 units of its own size and one of the sum so far. With
    # bfloat16 activations a group's own sums take 17 more.
    terms = 2 * groups.scale.shape[1]
    scales, minima = (np.repeat(np.abs(each), groups.group, 1).astype(np.float64) for each in groups[1:3])
    rounding = (terms + 5 + 17) * UNIT * 1.05 * (np.abs(x) @ (np.abs(groups.whole) * scales + minima).T)
    for dtype in DTYPES:
        if dtype == "bfloat16":
            rule, allowed = quant_rules.kept_product(x, groups), rounding
        else:
            whole = quant_rules.quantized_rows(x, dtype)
            rule = quant_rules.whole_product(whole, groups)
            allowed = rounding + HALF * np.repeat(whole.scale, 32, axis=1) @ np.abs(numbers).T
        for table in TABLES:
            found = product(table, format, activations(x), w, n, k, dtype)
            np.testing.assert_array_equal(found.view(np.uint32), rule.view(np.uint32), f"{table} {dtype}")
        assert (np.abs(rule - exact) <= allowed).all()


def test_the_largest_codes_do_not_saturate() -> None:
    """Codes of 0 and 255 against activations of +-127: what VPMADDUBSW alone would cut off."""
    k = 64
    records = np.zeros((16, k // 32), np.dtype([("d", "<f2"), ("qs", "i1", 32)]))
    records["d"] = 1
    records["qs"] = np.where(np.arange(32) % 2, -128, 127)
    records["qs"][3] = 127
    records["qs"][4] = -128
    raw = records.view(np.uint8).reshape(16, -1)
    x = np.full((3, k), 127, F32)
    x[1] = -127
    x[2] = np.where(np.arange(k) % 2, -127, 127)
    exact = x @ dequantized("Q8_0", raw).T
    for table in TABLES:
        found = product(table, "Q8_0", activations(x), packed("Q8_0", raw, k), 16, k, "int8")
        np.testing.assert_array_equal(found, exact, table)


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_each_other_or_on_ranges(format: str, dtype: str) -> None:
    rng = np.random.default_rng(6)
    m, n, k = 53, 70, 256
    _, w = weight(format, n, k, 7)
    x = normal(rng, m, k)
    whole = product("portable", format, activations(x), w, n, k, dtype)
    for table in TABLES:
        out = np.full((m, n), np.nan, F32)
        for rows in cuts(rng, m):
            for panels in cuts(rng, up(n, 16) // 16):
                quant.matmul(
                    table,
                    format,
                    activations(x, 32),
                    w,
                    n,
                    k,
                    dtype,
                    out_float=out,
                    out_width=n,
                    rows=rows,
                    panels=panels,
                )
        np.testing.assert_array_equal(out, whole, table)
        for row in (0, 31, 52):
            np.testing.assert_array_equal(
                product(table, format, activations(x[row : row + 1]), w, n, k, dtype)[0], whole[row]
            )


@pytest.mark.parametrize("format", ["Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("epilogue", ["store", "add", "silu_mul", "gelu_mul", "float"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_epilogues_are_those_of_bfloat16_weights(format: str, epilogue: str, with_bias: bool) -> None:
    """What is done with the sums: by the rules, from the sums themselves."""
    rng = np.random.default_rng(8)
    m, n, k = 19, 64, 256
    _, w = weight(format, n, k, 9)
    x = activations(normal(rng, m, k, scale=3))
    bias = rng.standard_normal(n).astype(F32) if with_bias else None
    sums = product("portable", format, x, w, n, k, "int8") + (0 if bias is None else bias)
    residual = rng.standard_normal((m, n)).astype(F32)
    for table in TABLES:
        floats, bits = np.full((m, n), np.nan, F32), np.full((m, n), POISON, np.uint16)
        gated = epilogue.endswith("_mul")
        quant.matmul(
            table, format, x, w, n, k, "int8", epilogue=epilogue, bias=bias, out=bits, out_float=floats,
            residual=residual if epilogue == "add" else None, out_width=n // 2 if gated else n,
        )  # fmt: skip
        if epilogue == "float":
            np.testing.assert_array_equal(floats, sums, table)
        elif epilogue == "add":
            np.testing.assert_array_equal(floats, residual + rules.rounded(sums), table)
        elif epilogue == "store":
            np.testing.assert_array_equal(bits, rules.to_bf16(sums), table)
        else:
            panels = rules.rounded(sums).reshape(m, -1, 2, 16)  # gate and up in turn
            f = rules.silu if epilogue == "silu_mul" else rules.gelu
            want = f(panels[:, :, 0]) * panels[:, :, 1]
            np.testing.assert_array_equal(bits[:, : n // 2], rules.to_bf16(want.reshape(m, -1)), table)


# ---- int8 made at load


@pytest.mark.parametrize("k", [32, 100, 512])
def test_int8_is_within_half_a_step_and_products_are_the_rule(k: int) -> None:
    rng = np.random.default_rng(10)
    n, m = 37, 6
    numbers = rng.standard_normal((n, k)).astype(F32) * F32(0.05)
    numbers[3, :32] = 0
    w = np.full(quant.packed_bytes("int8", n, k), 0xA5, np.uint8)
    quant.pack_int8(numbers, w)
    kept = np.full((n, k), np.nan, F32)
    quant.unpack("int8", w, kept)
    padded = np.zeros((n, up(k, 32)), F32)
    padded[:, :k] = numbers
    scale = np.abs(padded).reshape(n, -1, 32).max(-1) / F32(127)
    assert (np.abs(kept - numbers) <= np.repeat(scale, 32, axis=1)[:, :k] * 0.5001).all()
    assert np.abs(kept).max() == pytest.approx(np.abs(numbers).max())
    whole = np.zeros(padded.shape, np.int64)
    whole[:, :k] = np.rint(kept / np.where(scale == 0, 1, scale).repeat(32, axis=1)[:, :k])
    groups = quant_rules.Grouped(whole, scale, np.zeros_like(scale), 32)
    x = np.zeros((m, up(k, 32)), F32)
    x[:, :k] = normal(rng, m, k)
    for table in TABLES:
        found = product(table, "int8", activations(x[:, :k]), w, n, k, "int8")
        np.testing.assert_array_equal(
            found, quant_rules.whole_product(quant_rules.quantized_rows(x, "int8"), groups), table
        )


def test_formats_with_minima_have_them() -> None:
    for format in FORMATS:
        raw, _ = weight(format, 4, 512, 11)
        assert grouped(format, raw).minimum.any() == (format in MINIMA)
