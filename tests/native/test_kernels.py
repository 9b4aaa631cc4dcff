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


# ---- attention


class Cache:
    """Keys and values of one sequence in a paged cache whose other slots are all NaN; with `codes` in int8."""

    def __init__(
        self,
        rng: np.random.Generator,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        codes: bool = False,
    ) -> None:
        self.keys, self.values = normal(rng, tokens, kv_heads, head_dim), normal(rng, tokens, kv_heads, head_dim)
        self.scales: tuple[Floats, Floats] | None = None
        self.largest = np.abs(self.values).max()
        if codes:
            (self.keys, key_scales), (self.values, value_scales) = map(rules.quantize_heads, (self.keys, self.values))
            self.scales = key_scales, value_scales
        self.block_size = block_size
        self.lay_out(rng)

    def lay_out(self, rng: np.random.Generator) -> None:
        """Into random blocks, one of which stays unused."""
        tokens, kv_heads, dim = self.keys.shape
        blocks = -(-tokens // self.block_size)
        self.table = rng.permutation(blocks + 1)[:blocks].astype(np.int32)
        panels = self.block_size // 16
        if self.scales:
            self.lay_out_codes(blocks, panels)
            return
        keys = np.full((blocks + 1, kv_heads, panels, dim // 2, 16, 2), POISON, np.uint16)
        values = np.full((blocks + 1, kv_heads, panels, 8, dim, 2), POISON, np.uint16)
        for t in range(tokens):
            block, slot = self.table[t // self.block_size], t % self.block_size
            keys[block, :, slot // 16, :, slot % 16, :] = rules.to_bf16(self.keys[t]).reshape(kv_heads, -1, 2)
            values[block, :, slot // 16, slot % 16 // 2, :, slot % 2] = rules.to_bf16(self.values[t])
        self.packed_keys, self.packed_values = keys, values

    def lay_out_codes(self, blocks: int, panels: int) -> None:
        tokens, kv_heads, dim = self.keys.shape
        keys, values = np.full((2, blocks + 1, kv_heads, panels, 16 * (dim + 4)), 0xFF, np.uint8)
        for t in range(tokens):
            place, lane = (self.table[t // self.block_size], slice(None), t % self.block_size // 16), t % 16
            codes = self.keys[t].astype(np.int8).view(np.uint8), self.values[t].astype(np.int8).view(np.uint8)
            keys[place][:, lane : 16 * dim : 16] = codes[0]
            halves = values[place][:, : 16 * dim].reshape(kv_heads, 8, dim // 16, 2, 16)
            halves[:, lane // 2, :, lane % 2] = codes[1].reshape(kv_heads, -1, 16)
            values[place][:, : 16 * dim] = halves.reshape(kv_heads, -1)
            for part, scales in zip((keys, values), self.scales or (), strict=True):
                part[place][:, 16 * dim :].view(F32)[:, lane] = scales[t]
        self.packed_keys, self.packed_values = keys, values

    def poison(self, before: int) -> None:
        """What a window has left behind: positions that are never seen again."""
        for t in range(before):
            block, slot = self.table[t // self.block_size], t % self.block_size
            if self.scales:
                for part in (self.packed_keys, self.packed_values):
                    part[block, :, slot // 16, 16 * self.keys.shape[2] :].view(F32)[:, slot % 16] = np.nan
                continue
            self.packed_keys[block, :, slot // 16, :, slot % 16, :] = POISON
            self.packed_values[block, :, slot // 16, slot % 16 // 2, :, slot % 2] = POISON

    def attend(self, table: str, q: Floats, heads: int, first: int, count: int, **options: object) -> Bits:
        """The kernel's rows first .. first + count - 1 of q [rows, heads * head_dim]; the others must stay."""
        out = blank(*q.shape)
        _, kv_heads, dim = self.keys.shape
        common = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "block_size": self.block_size}
        flat = self.packed_keys.ravel(), self.packed_values.ravel(), self.table
        kernels.attention(table, activations(q), out, *flat, first=first, count=count, **common, **options)
        got = written(out, q.shape[1])
        assert (np.delete(got, np.s_[first : first + count], axis=0) == POISON).all()
        return got[first : first + count]

    def expect(self, q: Floats, heads: int, position: int, window: int, scale: float, softcap: float) -> Bits:
        """q [count, heads * head_dim] at position .."""
        kv_heads, dim = self.keys.shape[1:]
        want = np.empty((len(q), heads, dim), F32)
        for row, head in np.ndindex(len(q), heads):
            last = position + row
            seen = max(0, last - window + 1) if window else 0
            kv = head * kv_heads // heads
            query = q[row, head * dim : (head + 1) * dim]
            scales = self.scales and (self.scales[0][:, kv], self.scales[1][:, kv])
            want[row, head] = rules.attend(
                query, self.keys[:, kv], self.values[:, kv], seen, last, scale, softcap, scales
            )
        return rules.to_bf16(want).reshape(len(q), -1)


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from([1, 3, 6, 7, 8, 13]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 32, 48, 64, 80]),
    block_size=st.sampled_from([16, 32, 48]),
    position=st.integers(0, 70),
    count=st.integers(1, 9),
    window=st.sampled_from([0, 1, 5, 16, 33]),
    softcap=st.sampled_from([0.0, 5.0]),
    codes=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_attention_is_the_rule_bit_for_bit(
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    position: int,
    count: int,
    window: int,
    softcap: float,
    codes: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    heads = group * kv_heads
    cache = Cache(rng, position + count, kv_heads, head_dim, block_size, codes)
    q = normal(rng, count + 3, heads * head_dim, scale=2)
    options = {"window": window, "scale": head_dim**-0.5, "softcap": softcap}
    want = cache.expect(q[2 : 2 + count], heads, position, **options)
    if window:
        cache.poison(position - window + 1)
    for table in TABLES:
        got = cache.attend(table, q, heads, 2, count, position=position, **options)
        np.testing.assert_array_equal(got, want, table)


@pytest.mark.parametrize("window", [0, 100, 255, 256, 257, 512])
@pytest.mark.parametrize("position", [254, 510, 600])
@pytest.mark.parametrize("codes", [False, True])
def test_attention_across_pieces(codes: bool, window: int, position: int) -> None:
    rng = np.random.default_rng(window)
    cache = Cache(rng, position + 4, 1, 32, 16, codes)
    q = normal(rng, 4, 3 * 32, scale=3)
    options = {"window": window, "scale": 0.2, "softcap": 0.0}
    want = cache.expect(q, 3, position, **options)
    if window:
        cache.poison(position - window + 1)
    for table in TABLES:
        np.testing.assert_array_equal(cache.attend(table, q, 3, 0, 4, position=position, **options), want, table)


@each_table
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_attention_does_not_depend_on_chunks_ranges_or_blocks(table: str, group: int, codes: bool) -> None:
    rng, dim, count, kv_heads = np.random.default_rng(group), 64, 300, 2
    heads = group * kv_heads
    cache = Cache(rng, count, kv_heads, dim, 16, codes)
    q = normal(rng, count, heads * dim, scale=2)
    options = {"scale": 0.125, "window": 270}
    whole = cache.attend(table, q, heads, 0, count, position=0, **options)
    for begin, end in cuts(rng, count):  # chunks of a prefill
        np.testing.assert_array_equal(
            cache.attend(table, q, heads, begin, end - begin, position=begin, **options), whole[begin:end]
        )
    for row in (0, 17, 271, 299):  # decode
        np.testing.assert_array_equal(cache.attend(table, q, heads, row, 1, position=row, **options)[0], whole[row])
    cache.block_size = 48
    cache.lay_out(rng)
    np.testing.assert_array_equal(cache.attend(table, q, heads, 0, count, position=0, **options), whole)
    columns = group * dim  # one KV head, some rows
    part = cache.attend(table, q, heads, 0, count, position=0, rows=(100, 200), kv_range=(1, 2), **options)
    np.testing.assert_array_equal(part[100:200, columns:], whole[100:200, columns:])
    assert (part[:, :columns] == POISON).all()
    assert (np.delete(part, np.s_[100:200], axis=0) == POISON).all()


@each_table
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("group", "count"), [(1, 1), (3, 1), (7, 5), (3, 40)])
def test_attention_in_pieces_that_are_joined_is_attention(
    table: str, group: int, count: int, window: int, codes: bool
) -> None:
    rng, dim, tokens = np.random.default_rng(group), 48, 1100
    cache = Cache(rng, tokens, 2, dim, 16, codes)
    q = normal(rng, count, 2 * group * dim, scale=2)
    options = {"scale": 0.2, "window": window, "position": tokens - count}
    whole = cache.attend(table, q, 2 * group, 0, count, **options)
    first = (tokens - count - window + 1) // 256 if window else 0
    cache.poison(first * 256)
    runs = cuts(rng, 5 - first)
    pieces = [(first + runs[i][0], first + runs[i][1]) for i in rng.permutation(len(runs))]
    np.testing.assert_array_equal(cache.attend(table, q, 2 * group, 0, count, pieces=pieces, **options), whole)


@each_table
@pytest.mark.parametrize("dim", [16, 64, 80, 256])
@pytest.mark.parametrize("size", [1.0, 1000.0, 2.0**-90, 2.0**-110, 0.0])
def test_a_stored_head_is_the_rule_bit_for_bit(table: str, dim: int, size: float) -> None:
    x = normal(np.random.default_rng(dim), 20, dim, scale=size)
    x[3] = 0
    want, scales = rules.quantize_heads(x)
    for row, codes, scale in zip(rules.to_bf16(x), want, scales, strict=True):
        got = np.full(dim, 99, np.int8)
        assert kernels.quantize_head(table, row, got) == scale
        np.testing.assert_array_equal(got, codes)
    assert np.abs(want).max() == (0 if size * 16 < 2.0**-100 else 127)
    n = rules.turn_width(dim)
    back = rules.turn(want * scales[:, None]).reshape(x.shape) / n
    assert np.abs(back - x).max() <= 0.51 * scales.max() + (8 * size if size < 2.0**-100 else 0)
    assert np.isnan(
        kernels.quantize_head(table, rules.to_bf16(np.array([1.0, np.inf] * 8, F32)), np.empty(16, np.int8))
    )


@pytest.mark.parametrize(("head_dim", "softcap"), [(64, 0.0), (256, 0.0), (128, 50.0)])
def test_attention_is_near_float64_and_the_same_on_every_table(head_dim: int, softcap: float) -> None:
    rng, tokens, heads = np.random.default_rng(head_dim), 700, 4
    cache = Cache(rng, tokens, 1, head_dim, 16)
    q = normal(rng, 40, heads * head_dim)
    options = {"scale": head_dim**-0.5, "softcap": softcap}
    results = [cache.attend(t, q, heads, 0, 40, position=tokens - 40, **options) for t in TABLES]
    assert all((r == results[0]).all() for r in results)

    query = q.reshape(40, heads, head_dim).astype(np.float64)
    keys, values = cache.keys[:, 0].astype(np.float64), cache.values[:, 0].astype(np.float64)
    scores = np.einsum("rhd,td->rht", query, keys) * options["scale"]
    error = (head_dim / 32 + 34) * UNIT * np.einsum("rhd,td->rht", abs(query), abs(keys)).max() * options["scale"]
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
        error += 4 * UNIT * softcap
    hidden = np.arange(tokens) > (tokens - 40 + np.arange(40))[:, None, None]
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights /= weights.sum(-1, keepdims=True)
    exact, size = np.einsum("rht,td->rhd", weights, values), np.einsum("rht,td->rhd", weights, abs(values))
    # Each weight is off by its own rounding to bfloat16 and by its score's error, above and below the fraction; sums
    # over tokens (44 chunks), three merges and a division round in float32; the result is rounded once.
    relative = 2 * (BF16_UNIT + error) + (44 + 32 + 16) * UNIT
    got = rules.from_bf16(results[0]).reshape(40, heads, head_dim)
    assert (np.abs(got - exact) <= 1.01 * (relative * size + BF16_UNIT * np.abs(exact))).all()


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


@pytest.mark.skipif(not FAST, reason="this machine has no table of fast math")
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("group", "dim", "window"), [(1, 64, 0), (3, 48, 270), (7, 256, 0)])
def test_fast_attention_is_near_the_rule_and_does_not_depend_on_chunks(
    group: int, dim: int, window: int, codes: bool
) -> None:
    rng, count = np.random.default_rng(group), 600
    cache = Cache(rng, count, 1, dim, 16, codes)
    q = normal(rng, count, group * dim, scale=2)
    options = {"scale": dim**-0.5, "window": window}
    for table in FAST:
        whole = cache.attend(table, q, group, 0, count, position=0, **options)
        rule = rules.from_bf16(cache.attend("portable", q, group, 0, count, position=0, **options))
        # Scores differ by float32 roundings, so that a weight may round the other way; the result rounds once more.
        assert (np.abs(rules.from_bf16(whole) - rule) <= 4 * BF16_UNIT * cache.largest).all()
        for begin, end in cuts(rng, count):
            part = cache.attend(table, q, group, begin, end - begin, position=begin, **options)
            np.testing.assert_array_equal(part, whole[begin:end])
        for row in (0, 17, 271, 599):
            one = cache.attend(table, q, group, row, 1, position=row, **options)[0]
            np.testing.assert_array_equal(one, whole[row])
        pieces = cache.attend(table, q, group, 0, count, position=0, pieces=[(1, 3), (0, 1)], **options)
        np.testing.assert_array_equal(pieces, whole)


@each_table
def test_a_nan_that_is_seen_is_not_hidden(table: str) -> None:
    cache = Cache(np.random.default_rng(8), 20, 1, 16, 16)
    q = normal(np.random.default_rng(9), 20, 16)
    cache.packed_keys[cache.table[0], 0, 0, 3, 5, 0] = POISON  # position 5
    got = cache.attend(table, q, 1, 0, 20, position=0, scale=0.25)
    nan = np.isnan(rules.from_bf16(got))
    assert not nan[:5].any()
    assert nan[5:].all()
