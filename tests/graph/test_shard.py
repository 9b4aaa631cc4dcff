"""Tensor parallelism: what each worker gets, that together it is everything once, and what cannot be divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.graph import Cut, Graph, Shard, Trace, Value, shard
from tests.graph.models import decoder

SMOL = {"layers": 2, "heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 576, "inner": 1536, "vocab": 49152}
GEMMA = {"layers": 2, "heads": 4, "kv_heads": 1, "head_dim": 256, "hidden": 640, "inner": 2048, "vocab": 262144}

FIRST_OF_TWO = """\
graph(token_ids: i32[T], positions: i32[T]) -> %18.whole: f32[S, 40]
  %0.partial: f32[T, 8] = embed(token_ids, embed.weight: bf16[32, 8], scale=1, first=0)
  %0: f32[T, 8] = all_reduce(%0.partial)
  %1: bf16[T, 8] = rms_norm(%0, 0.attn_norm.weight: f32[8], eps=1e-05)
  %2: bf16[T, 16] = linear(%1, 0.q.weight: bf16[16, 8], 0.q.bias: bf16[16])
  %3: bf16[T, 8] = linear(%1, 0.k.weight: bf16[8, 8], 0.k.bias: bf16[8])
  %4: bf16[T, 8] = linear(%1, 0.v.weight: bf16[8, 8], 0.v.bias: bf16[8])
  %5: bf16[T, 16] = rope(%2, positions, head_dim=4, inv_freq=[1, 0.5], attention_factor=1)
  %6: bf16[T, 8] = rope(%3, positions, head_dim=4, inv_freq=[1, 0.5], attention_factor=1)
  %7: bf16[T, 16] = attention(%5, %6, %4, layer=0, num_heads=4, num_kv_heads=2, head_dim=4, scale=0.25)
  %8.partial: f32[T, 8] = linear(%7, 0.o.weight: bf16[8, 16], 0.o.bias: bf16[8])
  %8: bf16[T, 8] = all_reduce(%8.partial)
  %9: f32[T, 8] = add(%0, %8)
  %10: bf16[T, 8] = rms_norm(%9, 0.mlp_norm.weight: f32[8], eps=1e-05)
  %11: bf16[T, 32] = linear(%10, 0.gate.weight: bf16[32, 8])
  %12: bf16[T, 32] = linear(%10, 0.up.weight: bf16[32, 8])
  %13: bf16[T, 32] = silu_mul(%11, %12)
  %14.partial: f32[T, 8] = linear(%13, 0.down.weight: bf16[8, 32], 0.down.bias: bf16[8])
  %14: bf16[T, 8] = all_reduce(%14.partial)
  %15: f32[T, 8] = add(%9, %14)
  %16: f32[S, 8] = select_rows(%15)
  %17: bf16[S, 8] = rms_norm(%16, norm.weight: f32[8], eps=1e-05)
  %18: f32[S, 32] = lm_head(%17, embed.weight: bf16[32, 8])
  %19: f32[S, 32] = softcap(%18, cap=30)
  %19.whole: f32[S, 40] = gather(%19, widths=[32, 8])""".replace("-> %18.whole", "-> %19.whole")


def shards(graph: Graph, size: int, block: int = 1) -> list[Shard]:
    return [shard(graph, size, rank, lambda name: block) for rank in range(size)]


def test_a_worker_runs_its_part_and_says_where_sums_are_made() -> None:
    graph = decoder(layers=1, heads=6, kv_heads=3, head_dim=4, hidden=8, inner=48, vocab=40, bias=True)
    first, second = shards(graph, 2)
    assert str(first.graph) == FIRST_OF_TWO
    biases = {name for name in graph.weights if name.endswith("bias")}
    assert {name for name in second.graph.weights if name in biases} == {"0.q.bias", "0.k.bias", "0.v.bias"}
    assert second.cuts["embed.weight"] == Cut(0, 32, 40)
    assert second.cuts["0.o.weight"] == Cut(1, 16, 24)
    assert second.cuts["0.k.bias"] == Cut(0, 8, 12)


def test_one_worker_has_all() -> None:
    graph = decoder(**SMOL)
    assert shard(graph, 1, 0, lambda name: 1) == Shard(graph, {})


def test_smollm2s_kv_heads_are_dealt_unevenly() -> None:
    kv = [part.graph.kv_shapes[0] for part in shards(decoder(**SMOL), 2, block=32)]
    assert kv == [(2, 64), (1, 64)]
    heads = [
        [node.integer("num_heads") for node in part.graph.nodes if node.op == "attention"]
        for part in shards(decoder(**SMOL), 2)
    ]
    assert heads == [[6, 6], [3, 3]]


def test_more_workers_than_kv_heads_hold_the_same_one() -> None:
    first, second = shards(decoder(**GEMMA, qk_norm=True), 2, block=256)
    assert first.graph.kv_shapes == second.graph.kv_shapes == {0: (1, 256), 1: (1, 256)}
    assert "0.k.weight" not in first.cuts
    assert "0.k.weight" not in second.cuts
    assert (first.cuts["0.q.weight"], second.cuts["0.q.weight"]) == (Cut(0, 0, 512), Cut(0, 512, 1024))
    assert (first.cuts["0.down.weight"], second.cuts["0.down.weight"]) == (Cut(1, 0, 1024), Cut(1, 1024, 2048))


def test_columns_keep_the_blocks_of_the_file() -> None:
    parts = shards(decoder(**{**GEMMA, "inner": 1280}), 2, block=256)  # five blocks
    assert [part.cuts["0.down.weight"] for part in parts] == [Cut(1, 0, 768), Cut(1, 768, 1280)]
    assert [part.cuts["0.gate.weight"] for part in parts] == [Cut(0, 0, 768), Cut(0, 768, 1280)]


@pytest.mark.parametrize(
    ("changes", "size", "block", "words"),
    [
        ({}, 4, 1, ["tensor_parallel_size=4", "3 KV heads", "at most 3", "up to 9"]),
        ({"kv_heads": 1}, 18, 1, ["tensor_parallel_size=18", "1 KV heads of 9", "up to 9"]),
        ({"inner": 64}, 3, 1, ["width of 64", "2 units of 32", "at most 2"]),
        ({"vocab": 32}, 3, 1, ["width of 32", "2 units of 16", "at most 2"]),
        ({}, 2, 256, ["0 to 384", "1.o.weight", "blocks of 256"]),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    changes: dict[str, int], size: int, block: int, words: Sequence[str]
) -> None:
    def column_block(name: str) -> int:
        return block if name == "1.o.weight" else 1

    with pytest.raises(ConfigError) as refused:
        shard(decoder(**{**SMOL, **changes}), size, 0, column_block)
    for word in words:
        assert word in str(refused.value)


def test_a_norm_over_divided_columns_is_refused() -> None:
    t = Trace("bfloat16")
    x = t.rms_norm(t.embed(t.token_ids, "embed", 64, 16), "norm", eps=1e-5)
    q = t.rms_norm(t.linear(x, "q", 16), "q_norm", eps=1e-5)
    k, v = (t.linear(x, name, 16) for name in "kv")
    h = t.attention(q, k, v, layer=0, num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0)
    graph = t.graph(t.lm_head(t.select_rows(t.linear(h, "o", 16)), "embed", 64))
    with pytest.raises(ConfigError, match="normed over all its columns"):
        shard(graph, 2, 0, lambda name: 1)


def between_attention_and_head(change: Callable[[Trace, Value], Value]) -> Graph:
    t = Trace("bfloat16")
    x = t.rms_norm(t.embed(t.token_ids, "embed", 64, 16), "norm", eps=1e-5)
    q, k, v = (t.linear(x, name, 16) for name in "qkv")
    h = change(t, t.attention(q, k, v, layer=0, num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0))
    return t.graph(t.lm_head(h if h.rows == "S" else t.select_rows(h), "embed", 64))


@pytest.mark.parametrize(
    ("change", "op"),
    [
        (lambda t, h: t.linear(t.rms_norm(h, "sub", eps=1e-5), "o", 16), "rms_norm"),
        (lambda t, h: t.linear(t.layer_norm(h, "sub", eps=1e-5), "o", 16), "layer_norm"),
        (lambda t, h: t.linear(t.select_rows(h), "o", 16), "select_rows"),
        (lambda t, h: h, "select_rows"),
        (lambda t, h: t.linear(t.silu_mul(t.linear(h, "gate", 64), t.linear(h, "up", 64)), "down", 16), "linear"),
    ],
)
def test_an_op_that_needs_all_columns_of_what_is_divided_is_refused(
    change: Callable[[Trace, Value], Value], op: str
) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size=2: %\d+ is divided, and the {op} that makes %\d+ "):
        shard(between_attention_and_head(change), 2, 0, lambda name: 1)


def test_what_lies_between_attention_and_head_may_be_a_product() -> None:
    graph = between_attention_and_head(lambda t, h: t.linear(h, "o", 16))
    assert [node.op for node in shard(graph, 2, 0, lambda name: 1).graph.nodes].count("all_reduce") == 2


@given(
    size=st.integers(2, 8),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 6),
    inner=st.integers(1, 40),
    vocab=st.integers(1, 700),
    block=st.sampled_from([1, 32, 256]),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_together_the_workers_hold_everything_once(
    size: int, kv_heads: int, group: int, inner: int, vocab: int, block: int, tied: bool, bias: bool
) -> None:
    heads = kv_heads * group
    graph = decoder(
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        hidden=64,
        inner=inner * block,
        vocab=vocab,
        tied=tied,
        bias=bias,
    )
    try:
        parts = shards(graph, size, block)
    except ConfigError:
        copies = size // kv_heads
        unit = max(32, block)
        assert (
            size > -(-vocab // 16)
            or size > -(-inner * block // unit)
            or (size > kv_heads and (size % kv_heads != 0 or copies > group))
        )
        return
    copied = {f"0.{name}" for name in ("k.weight", "v.weight", "k.bias", "v.bias")} if size > kv_heads else set()
    for name, weight in graph.weights.items():
        held: Counter[int] = Counter()
        for part in parts:
            if name not in part.graph.weights:
                assert name in ("0.o.bias", "0.down.bias")
                continue
            cut = part.cuts.get(name, Cut(0, 0, weight.shape[0]))
            expected = list(weight.shape)
            expected[cut.axis] = cut.end - cut.begin
            assert part.graph.weights[name].shape == tuple(expected)
            held.update(range(cut.begin, cut.end))
            axis = cut.axis
        if name in copied:
            assert set(held.values()) == {size // kv_heads}
        elif "norm" in name:
            assert set(held.values()) == {size}
        else:
            assert set(held.values()) == {1}
        assert sorted(held) == list(range(weight.shape[axis]))


@given(size=st.integers(2, 6), kv_heads=st.integers(1, 12), group=st.integers(1, 4), inner=st.integers(6, 40))
def test_a_worker_holds_its_share_and_at_most_one_indivisible_group_more(
    size: int, kv_heads: int, group: int, inner: int
) -> None:
    assume(size <= kv_heads)
    graph = decoder(
        layers=1, heads=kv_heads * group, kv_heads=kv_heads, head_dim=16, hidden=64, inner=32 * inner, vocab=1024
    )
    matrices = {name: prod(weight.shape) for name, weight in graph.weights.items() if len(weight.shape) == 2}
    units = {"attention": (2 * group + 2) * 16 * 64, "mlp": 3 * 32 * 64, "vocabulary": 16 * 64}
    for part in shards(graph, size):
        own = sum(prod(part.graph.weights[name].shape) for name in matrices)
        assert own <= sum(matrices.values()) / size + sum(units.values())
