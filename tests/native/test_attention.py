"""Paged attention of every table, bfloat16 and int8: its bits against kernel_rules.py, its value against float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo._native import kernels
from tests.native import kernel_rules as rules
from tests.native.kernel_rules import F32, Bits, Floats
from tests.native.test_kernels import (
    BF16_UNIT,
    FAST,
    POISON,
    TABLES,
    UNIT,
    activations,
    blank,
    cuts,
    each_table,
    normal,
    written,
)


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
            codes = (self.keys[t] + 128).astype(np.uint8), (self.values[t] + 128).astype(np.uint8)
            quads = keys[place][:, : 16 * dim].reshape(kv_heads, dim // 4, 16, 4)
            quads[:, :, lane] = codes[0].reshape(kv_heads, -1, 4)
            keys[place][:, : 16 * dim] = quads.reshape(kv_heads, -1)
            quads = values[place][:, : 16 * dim].reshape(kv_heads, 4, dim, 4)
            quads[:, lane // 4, :, lane % 4] = codes[1]
            values[place][:, : 16 * dim] = quads.reshape(kv_heads, -1)
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
