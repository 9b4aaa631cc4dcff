"""Every kernel of every table here: its bits against the rules in kernel_rules.py, its value against float64.

Memory that a kernel must not use is poisoned with NaN, and what it must not write is checked to be as it was. To have
the amx table in here on a machine without AMX, build with the CMake option OCTAVO_EMULATE_TILES.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo._native import fast_table, kernels
from tests.native import kernel_rules as rules
from tests.native.kernel_rules import F32, Bits, Floats

TABLES = kernels.tables()
FAST = sorted({fast_table(table) for table in TABLES} - set(TABLES))  # not of the contract
POISON = 0x7FC1  # a NaN that no kernel writes
UNIT = 2.0**-24  # unit roundoff of float32
BF16_UNIT = 2.0**-8  # of bfloat16

each_table = pytest.mark.parametrize("table", TABLES)


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Random bfloat16 values, as floats."""
    return rules.rounded(rng.standard_normal(shape).astype(F32) * F32(scale))


def activations(x: Floats, extra: int = 0) -> Bits:
    """x [rows, width] as a kernel's input: columns up to the stride (a multiple of 32, plus extra) are zero."""
    buffer = np.zeros((len(x), up(x.shape[1], 32) + extra), np.uint16)
    buffer[:, : x.shape[1]] = rules.to_bf16(x)
    return buffer


def blank(rows: int, width: int) -> Bits:
    return np.full((rows, up(width, 32) + 32), POISON, np.uint16)


def written(out: Bits, width: int) -> Bits:
    """The columns a kernel had to write; the others must be untouched."""
    assert (out[:, width:] == POISON).all()
    return out[:, :width]


def pack(w: Floats) -> Bits:
    n, k = w.shape
    out = np.full(up(n, 16) * up(k, 32), POISON, np.uint16)
    kernels.pack(w, out)
    return out


def cuts(rng: np.random.Generator, limit: int, step: int = 1) -> list[tuple[int, int]]:
    """[0, limit) cut at random multiples of step."""
    inner = rng.choice(np.arange(0, limit, step), size=min(3, -(-limit // step)), replace=False)
    edges = sorted({0, limit, *(int(i) for i in inner)})
    return list(itertools.pairwise(edges))


def test_portable_is_first_and_unknown_tables_are_refused() -> None:
    assert TABLES[0] == "portable"
    with pytest.raises(ValueError, match="mmx"):
        kernels.softcap("mmx", np.zeros(1, F32), 1.0)


# ---- conversions


@each_table
def test_every_bfloat16_survives_the_round_trip(table: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    out = np.empty_like(bits)
    kernels.to_bf16(table, rules.from_bf16(bits), out)
    magnitude = bits & 0x7FFF
    want = np.where(magnitude > 0x7F80, 0x7FC0, np.where(magnitude < 0x0080, bits & 0x8000, bits))
    np.testing.assert_array_equal(out, want)


@each_table
def test_float_to_bfloat16_rounds_as_torch_does(table: str) -> None:
    rng = np.random.default_rng(1)
    random = rng.integers(0, 1 << 32, 200_003, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([random, ties, ties - 1, ties + 1]).view(F32)
    out = np.empty(len(x), np.uint16)
    kernels.to_bf16(table, x, out)
    normal_or_zero = ~(np.abs(x) < np.finfo(F32).tiny) & ~np.isnan(x)
    want = torch.from_numpy(x[normal_or_zero]).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(out[normal_or_zero], want)
    assert (out[np.isnan(x)] == 0x7FC0).all()
    subnormal = np.abs(x) < np.finfo(F32).tiny
    np.testing.assert_array_equal(out[subnormal], np.where(np.signbit(x[subnormal]), 0x8000, 0))


@pytest.mark.parametrize("dtype", [F32, np.uint16])
def test_packing_puts_pairs_of_ks_side_by_side(dtype: type) -> None:
    w = normal(np.random.default_rng(2), 37, 45)
    rows = w if dtype is F32 else rules.to_bf16(w)
    out = np.full(48 * 64, POISON, np.uint16)
    kernels.pack(rows, out)
    want = np.zeros((48, 64), np.uint16)
    want[:37, :45] = rules.to_bf16(w)
    panels = out.reshape(3, 32, 16, 2)  # [panel][pair][column][k of the pair]
    np.testing.assert_array_equal(panels.transpose(0, 2, 1, 3).reshape(48, 64), want)


# ---- matrix products


@st.composite
def products(draw: st.DrawFn) -> dict[str, int | str | bool]:
    return {
        "m": draw(st.integers(1, 40)),
        "n": draw(st.integers(1, 70)),
        "k": draw(st.integers(1, 100)),
        "epilogue": draw(st.sampled_from(["store", "add", "silu_mul", "gelu_mul", "float"])),
        "bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 1 << 30)),
    }


def expect_product(x: Floats, w: Floats, bias: Floats | None, epilogue: str, residual: Floats) -> Floats:
    acc = rules.matrix_rule(x, w)
    y = acc if bias is None else acc + bias
    if epilogue == "add":
        return residual + rules.rounded(y)
    if epilogue in ("silu_mul", "gelu_mul"):
        activation = rules.silu if epilogue == "silu_mul" else rules.gelu
        gate, value = np.split(rules.rounded(y), 2, axis=1)
        return activation(gate) * value
    return y


@settings(max_examples=60, deadline=None)
@given(products())
def test_matmul_is_the_rule_bit_for_bit(case: dict) -> None:
    m, n, k, epilogue = case["m"], case["n"], case["k"], case["epilogue"]
    rng = np.random.default_rng(case["seed"])
    gated = epilogue.endswith("_mul")
    x, w = normal(rng, m, k), normal(rng, 2 * n if gated else n, k)
    bias = rng.standard_normal(len(w)).astype(F32) if case["bias"] else None
    residual = rng.standard_normal((m, n)).astype(F32)
    want = expect_product(x, w, bias, epilogue, residual)

    if gated:  # gate and up take turns, panel by panel
        packed = np.full(2 * up(n, 16) * up(k, 32), POISON, np.uint16)
        for first, half in enumerate(np.split(w, 2)):
            kernels.pack(half, packed, first=first, step=2)
        bias = None if bias is None else interleave(np.split(bias, 2), n)
        packed_n = 2 * up(n, 16)
    else:
        packed, packed_n = pack(w), n
        bias = None if bias is None else np.concatenate([bias, np.full(up(n, 16) - n, np.nan, F32)])
    arguments = {"n": packed_n, "k": k, "epilogue": epilogue, "bias": bias, "out_width": n}
    rows, panels = cuts(rng, m), cuts(rng, up(packed_n, 16) // 16, 2 if gated else 1)
    for table in TABLES:
        if epilogue in ("float", "add"):
            floats = np.full((m, n + 3), -7, F32)
            if epilogue == "add":  # in place, as the runtime uses it
                floats[:, :n] = residual
                arguments["residual"] = floats
            for r, p in itertools.product(rows, panels):
                kernels.matmul(table, activations(x), packed, out_float=floats, rows=r, panels=p, **arguments)
            np.testing.assert_array_equal(floats[:, :n], want, table)
            assert (floats[:, n:] == -7).all()
            continue
        out = blank(m, n)
        for r, p in itertools.product(rows, panels):
            kernels.matmul(table, activations(x, 32), packed, out=out, rows=r, panels=p, **arguments)
        np.testing.assert_array_equal(written(out, n), rules.to_bf16(want), table)


def interleave(halves: list[Floats], n: int) -> Floats:
    """Gate's and up's bias in the panels' order."""
    padded = [np.concatenate([h, np.zeros(up(n, 16) - n, F32)]).reshape(-1, 16) for h in halves]
    return np.stack(padded, axis=1).reshape(-1)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 1536), (3, 100, 2000), (37, 192, 576), (70, 49, 640)])
def test_matmul_is_near_float64_and_the_same_on_every_table(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x, w = normal(rng, m, k, scale=3), normal(rng, n, k, scale=0.05)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    # k / 32 additions to the accumulator, and 16 + 1 within a chunk, each of a partial sum below sum |x w|.
    bound = (k / 32 + 32) * UNIT * (np.abs(x).astype(np.float64) @ np.abs(w.T).astype(np.float64))
    results = []
    for table in TABLES:
        out = np.full((m, n), np.nan, F32)
        kernels.matmul(table, activations(x), pack(w), n=n, k=k, out_float=out, epilogue="float", out_width=n)
        assert (np.abs(out - exact) <= bound).all()
        results.append(out)
        alone = np.full((m, n), np.nan, F32)
        for row in range(m):
            kernels.matmul(
                table,
                activations(x),
                pack(w),
                n=n,
                k=k,
                out_float=alone,
                epilogue="float",
                out_width=n,
                rows=(row, row + 1),
            )
        np.testing.assert_array_equal(alone, out)
    assert all((r == results[0]).all() for r in results)


@each_table
def test_subnormals_are_zero(table: str) -> None:
    tiny = np.full((1, 32), 0x0040, np.uint16)  # 2^-127
    ones = np.full((16, 32), 0x3F80, np.uint16)
    packed, out = np.empty(16 * 32, np.uint16), np.full((1, 16), np.nan, F32)
    kernels.pack(ones, packed)
    kernels.matmul(table, tiny, packed, n=16, k=32, out_float=out, epilogue="float", out_width=16)
    assert (out == 0).all()
    total = np.full((1, 32), np.nan, F32)
    kernels.add(table, rules.from_bf16(tiny), tiny, total, 32)
    assert (total == 0).all()


# ---- norms, rotary embedding, elementwise


@each_table
@pytest.mark.parametrize(("groups", "width"), [(1, 576), (1, 37), (3, 64), (5, 16), (2, 40)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm(table: str, groups: int, width: int, in_place: bool) -> None:
    rng = np.random.default_rng(width)
    x, weight = normal(rng, 5, groups * width, scale=4), rng.standard_normal(width).astype(F32)
    out = blank(5, groups * width)
    out[:, : groups * width] = rules.to_bf16(x)
    kernels.rms_norm(table, out if in_place else activations(x), out, weight, groups=groups, eps=1e-5, rows=(1, 5))
    got = written(out, groups * width)
    grouped = x.reshape(5, groups, width)
    want = rules.to_bf16(rules.rms_norm(grouped, weight, 1e-5)).reshape(5, -1)
    np.testing.assert_array_equal(got[1:], want[1:])
    np.testing.assert_array_equal(got[0], rules.to_bf16(x)[0])
    exact = grouped.astype(np.float64)
    exact = (exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight).reshape(5, -1)
    # The sum of squares is off by at most (width / 16 + 4) roundings, its root by half of that; five operations follow.
    bound = (BF16_UNIT * 1.01 + (width / 32 + 7) * UNIT) * np.abs(exact)
    assert (np.abs(rules.from_bf16(got) - exact) <= bound)[1:].all()


@each_table
@pytest.mark.parametrize(("groups", "width"), [(1, 576), (1, 37), (3, 40)])
def test_rms_norm_of_the_residual_stream(table: str, groups: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((5, groups * width)).astype(F32) * F32(50), rng.standard_normal(width).astype(F32)
    padded = np.full((5, groups * width + 7), np.nan, F32)
    padded[:, :-7] = x
    out = blank(5, groups * width)
    kernels.rms_norm(table, padded, out, weight, groups=groups, eps=1e-5, rows=(1, 4))
    grouped = x.reshape(5, groups, width)
    want = rules.to_bf16(rules.rms_norm(grouped, weight, 1e-5)).reshape(5, -1)
    np.testing.assert_array_equal(written(out, groups * width)[1:4], want[1:4])
    assert (out[[0, 4]] == POISON).all()
    exact = grouped.astype(np.float64)
    exact = (exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight).reshape(5, -1)
    # As above, and each square is rounded, too.
    bound = (BF16_UNIT * 1.01 + (width / 32 + 8) * UNIT) * np.abs(exact)
    assert (np.abs(rules.from_bf16(out[:, : groups * width]) - exact) <= bound)[1:4].all()


@each_table
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (16, 8), (64, 16), (80, 40), (256, 128), (48, 20)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_turns_the_halves_and_copies_the_rest(table: str, head_dim: int, half: int, in_place: bool) -> None:
    rng, heads = np.random.default_rng(half), 3
    x = normal(rng, 4, heads * head_dim)
    angles = rng.uniform(-4, 4, (4, half))
    cos, sin = np.cos(angles).astype(F32), np.sin(angles).astype(F32)
    out = blank(4, heads * head_dim)
    out[:, : heads * head_dim] = rules.to_bf16(x)
    source = out if in_place else activations(x)
    for rows in [(0, 1), (1, 4)]:
        kernels.rope(table, source, out, cos, sin, heads=heads, head_dim=head_dim, rows=rows)
    got = written(out, heads * head_dim).reshape(4, heads, head_dim)
    whole = x.reshape(4, heads, head_dim)
    a, b, c, s = whole[..., :half], whole[..., half : 2 * half], cos[:, None], sin[:, None]
    np.testing.assert_array_equal(got[..., :half], rules.to_bf16(a * c - b * s))
    np.testing.assert_array_equal(got[..., half : 2 * half], rules.to_bf16(b * c + a * s))
    np.testing.assert_array_equal(got[..., 2 * half :], rules.to_bf16(whole[..., 2 * half :]))


@each_table
@pytest.mark.parametrize("width", [1, 16, 45, 576])
@pytest.mark.parametrize("f", ["silu", "gelu"])
def test_gate_mul(table: str, width: int, f: str) -> None:
    rng = np.random.default_rng(width)
    gate, value = normal(rng, 6, width, scale=5), normal(rng, 6, width)
    out = blank(6, width)
    for rows in cuts(rng, 6):
        kernels.gate_mul(table, activations(gate), activations(value, 32), out, width, f=f, rows=rows)
    got = written(out, width)
    activation = rules.silu if f == "silu" else rules.gelu
    np.testing.assert_array_equal(got, rules.to_bf16(activation(gate) * value))
    wide = torch.from_numpy(gate).double()
    exact = torch.nn.functional.silu(wide) if f == "silu" else torch.nn.functional.gelu(wide, approximate="tanh")
    exact = exact.numpy() * value
    # gelu: 1 + tanh cancels where tanh is near -1, so its error is relative to the inputs, not to the result.
    bound = BF16_UNIT * 1.01 * np.abs(exact) + 8 * UNIT * np.abs(gate * value)
    assert (np.abs(rules.from_bf16(got) - exact) <= bound).all()


@each_table
@pytest.mark.parametrize("width", [1, 31, 576])
def test_add(table: str, width: int) -> None:
    rng = np.random.default_rng(width)
    a, b = rng.standard_normal((3, width)).astype(F32), normal(rng, 3, width)
    out = np.full((3, width + 5), -7, F32)
    kernels.add(table, a, activations(b, 32), out, width)
    np.testing.assert_array_equal(out[:, :width], a + b)
    assert (out[:, width:] == -7).all()
    kernels.add(table, out, activations(b), out, width, rows=(1, 3))  # in place
    np.testing.assert_array_equal(out[:, :width], np.concatenate([(a + b)[:1], ((a + b) + b)[1:]]))


# ---- exp, tanh and their edges


def ulps(got: Floats, exact: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(got - exact) / np.spacing(np.abs(exact).astype(F32))))


def test_the_rules_exp_is_within_one_ulp() -> None:
    x = np.linspace(-87.33, 88.72, 2_000_001).astype(F32)
    assert ulps(rules.exp(x), np.exp(x.astype(np.float64))) <= 1.0
    edges = np.array([-np.inf, -1e30, -104, -87.34, 0, -0.0, 89, np.inf, np.nan], F32)
    np.testing.assert_array_equal(rules.exp(edges), np.array([0, 0, 0, 0, 1, 1, np.inf, np.inf, np.nan], F32))


def test_the_rules_tanh_is_within_two_ulps() -> None:
    x = np.concatenate([np.linspace(-10, 10, 1_000_001), np.geomspace(1e-30, 1e30, 100_001)]).astype(F32)
    assert ulps(rules.tanh(x), np.tanh(x.astype(np.float64))) <= 2.0


@each_table
def test_softcap_is_the_rules_tanh(table: str) -> None:
    rng = np.random.default_rng(5)
    edges = [0, -0.0, np.inf, -np.inf, np.nan, 1e-20, 1e30, -1e30]
    x = np.concatenate([rng.standard_normal(1000) * 40, edges]).astype(F32)
    for cap in (1.0, 30.0):
        got = x.copy()
        kernels.softcap(table, got, cap)
        want = rules.tanh(x / F32(cap)) * F32(cap)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got[:-8]), np.signbit(x[:-8]))
        assert np.nanmax(np.abs(got)) == cap


@each_table
def test_silu_of_any_bfloat16(table: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(1, -1)
    bits = np.where((bits & 0x7FFF) < 0x0080, bits & 0x8000, bits).astype(np.uint16)  # subnormals are zero
    one = np.full_like(bits, 0x3F80)
    out = np.empty_like(bits)
    kernels.gate_mul(table, bits, one, out, bits.shape[1])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, rules.to_bf16(rules.silu(rules.from_bf16(bits))))


# ---- tables of fast math


@pytest.mark.skipif(not FAST, reason="this machine has no table of fast math")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 1536), (3, 100, 2000), (37, 192, 576), (70, 49, 640)])
def test_fast_products_are_near_float64_and_rows_do_not_depend_on_each_other(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x, w = normal(rng, m, k, scale=3), normal(rng, n, k, scale=0.05)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    bound = (k + 1) * UNIT * (np.abs(x).astype(np.float64) @ np.abs(w.T).astype(np.float64))  # k additions in turn
    arguments = {"n": n, "k": k, "epilogue": "float", "out_width": n}
    for table in FAST:
        out, apart = np.full((m, n), np.nan, F32), np.full((m, n), np.nan, F32)
        kernels.matmul(table, activations(x), pack(w), out_float=out, **arguments)
        assert (np.abs(out - exact) <= bound).all()
        for rows, panels in itertools.product(cuts(rng, m), cuts(rng, up(n, 16) // 16)):
            kernels.matmul(table, activations(x, 32), pack(w), out_float=apart, rows=rows, panels=panels, **arguments)
        np.testing.assert_array_equal(apart, out)
