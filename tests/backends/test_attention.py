"""Paged attention alone, against float64: soft caps, windows, stored precision, and slots that hold no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.backends.base import Batch
from octavo.backends.torch import step as step_module
from octavo.backends.torch.ops import attention, rope
from octavo.backends.torch.step import AttentionShape, KVCache, Step

HEAD_DIM = 8
BLOCK = 4
Float = NDArray[np.float64]


def exact(q: Float, k: Float, v: Float, first: int, scale: float, window: int | None, softcap: float | None) -> Float:
    """q [m, heads, d] at positions first.., k and v [L, kv heads, d]: the definition, term by term."""
    out = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for i, head in np.ndindex(q.shape[:2]):
        last = first + i
        seen = slice(0 if window is None else max(0, last - window + 1), last + 1)
        scores = k[seen, head // group] @ q[i, head] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[i, head] = weights @ v[seen, head // group] / weights.sum()
    return out


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 2, 9, 33])), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    window=st.sampled_from([None, 1, 2, 5, 16]),
    softcap=st.sampled_from([None, 2.0]),
    kv_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_definition(
    sequences: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    kv_dtype: torch.dtype,
    seed: int,
) -> None:
    """Each sequence: (tokens in the cache, new tokens). The cache is NaN wherever no token of the batch lies."""
    rng = np.random.default_rng(seed)
    contexts = [past + new for past, new in sequences]
    tables = rng.permutation(64 * len(sequences))[: 16 * len(sequences)].reshape(len(sequences), 16).astype(np.int32)
    cache = KVCache(
        *(torch.full((64 * len(sequences), BLOCK, kv_heads, HEAD_DIM), torch.nan, dtype=kv_dtype) for _ in "kv"),
        group=1,
    )
    keys, values = ([rng.standard_normal((n, kv_heads, HEAD_DIM)) * 2 for n in contexts] for _ in "kv")
    keys, values = ([torch.tensor(x).to(kv_dtype) for x in part] for part in (keys, values))
    queries = [rng.standard_normal((new, kv_heads * group, HEAD_DIM)).astype(np.float32) for _, new in sequences]
    slots = [
        tables[r, np.arange(n) // BLOCK].astype(np.int64) * BLOCK + np.arange(n) % BLOCK for r, n in enumerate(contexts)
    ]
    for r, (past, _) in enumerate(sequences):
        for stored, part in ((cache.keys, keys), (cache.values, values)):
            stored.view(-1, kv_heads, HEAD_DIM)[slots[r][:past]] = part[r][:past]
    starts = np.cumsum([0, *(new for _, new in sequences)])
    batch = Batch(
        token_ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate([np.arange(past, past + new) for past, new in sequences]).astype(np.int32),
        slot_mapping=_second(np.concatenate([slots[r][past:] for r, (past, _) in enumerate(sequences)])),
        query_starts=starts.astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=_second(tables),
        logit_rows=np.empty(0, np.int32),
    )
    flat = [
        torch.cat([part[r][past:] for r, (past, _) in enumerate(sequences)]).float().reshape(starts[-1], -1)
        for part in (keys, values)
    ]
    found = attention(
        Step(batch, {3: cache}, BLOCK, torch.device("cpu"), torch.float32),
        torch.from_numpy(np.concatenate(queries)).reshape(starts[-1], -1),
        *flat,
        layer=3,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        scale=0.3,
        window=window,
        softcap=softcap,
    )
    for r, (past, new) in enumerate(sequences):
        k, v = (part[r].double().numpy() for part in (keys, values))
        expected = exact(queries[r].astype(np.float64), k, v, past, 0.3, window, softcap)
        np.testing.assert_allclose(found[starts[r] : starts[r] + new].reshape(expected.shape), expected, atol=2e-5)


def _second(own: NDArray[np.generic]) -> NDArray[np.generic]:
    """Tables of two groups, of which the first is of no use here."""
    return np.stack([np.full_like(own, 2**30), own])


def test_rope_turns_the_first_columns_and_leaves_the_rest() -> None:
    """Against complex multiplication in float64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 2, 10))
    positions = np.array([0, 1, 7, 100, 3], np.int32)
    inv_freq = (1.0, 0.25, 0.0625)
    empty = np.empty(0, np.int32)
    batch = Batch(empty, positions, empty.astype(np.int64)[None], empty, empty, empty.reshape(1, 0, 0), empty)
    step = Step(batch, {}, BLOCK, torch.device("cpu"), torch.float32)
    rows = torch.tensor(x, dtype=torch.float32).reshape(5, 20)
    found = rope(step, rows, step.positions, head_dim=10, inv_freq=inv_freq, attention_factor=1.5)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * 1.5 * np.exp(1j * positions[:, None] * np.array(inv_freq))[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
    np.testing.assert_allclose(found.reshape(5, 2, 10), expected, atol=1e-5)


def test_two_ropes_in_one_step_do_not_mix() -> None:
    """Gemma 3 has one for local and one for global layers."""
    empty = np.empty(0, np.int32)
    batch = Batch(
        empty, np.array([9], np.int32), empty.astype(np.int64)[None], empty, empty, empty.reshape(1, 0, 0), empty
    )
    step = Step(batch, {}, BLOCK, torch.device("cpu"), torch.float32)
    for frequency, factor in ((0.5, 1.0), (0.25, 1.0), (0.5, 2.0)):
        cos, sin = step.rotation((frequency,), factor)
        assert (cos.item(), sin.item()) == pytest.approx(
            (factor * np.cos(9 * frequency), factor * np.sin(9 * frequency)), abs=1e-6
        )


@pytest.mark.parametrize("window", [None, 40])
def test_what_a_piece_gathers_and_scores_is_bounded(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence must not make short ones as wide as itself, nor may a crowd add up."""
    monkeypatch.setattr(step_module, "GATHER_BYTES", 400 * 2 * HEAD_DIM * 4)  # 400 tokens
    monkeypatch.setattr(step_module, "SCORE_BYTES", 30 * 900 * 6 * 4)  # 30 rows of 900 tokens
    lengths = np.array([300, 5, 7, 90, 100, 3, *[50] * 20, 1000, 900])
    chunk = np.array([1] * 27 + [200])  # all decode but the last
    starts = np.cumsum([0, *chunk]).astype(np.int32)
    empty = np.empty(0, np.int32)
    batch = Batch(
        token_ids=empty,
        positions=np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, chunk, strict=True)]).astype(np.int32),
        slot_mapping=empty.astype(np.int64)[None],
        query_starts=starts,
        context_lens=lengths.astype(np.int32),
        block_tables=np.zeros((1, 28, 250), np.int32),
        logit_rows=empty,
    )
    shape = AttentionShape(6, 2, HEAD_DIM, window, group=0, rows_per_block=BLOCK)
    pieces = Step(batch, {}, BLOCK, torch.device("cpu"), torch.float32).pieces(shape)
    singles = [piece for piece in pieces if isinstance(piece.rows, torch.Tensor)]
    chunks = [piece.rows for piece in pieces if isinstance(piece.rows, slice)]
    assert sorted(row for piece in singles for row in piece.rows.tolist()) == list(range(27))
    assert [row for rows in chunks for row in range(rows.start, rows.stop)] == list(range(27, 227))
    assert max(rows.stop - rows.start for rows in chunks) == 30
    widths = np.minimum(lengths[:-1], window or 10**6)
    for piece in singles:
        tokens = len(piece.slots) // 2
        assert tokens <= 400 or piece.num_sequences == 1
        assert tokens <= 2 * widths[piece.rows].sum()
