"""The op vocabulary and the graph: printing, inference of shapes, errors, and checkpoints held against it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from octavo.errors import ModelError
from octavo.graph import DType, Graph, KVGroup, Op, Trace, Value

PRINTED = """\
graph(token_ids: i32[T], positions: i32[T]) -> %20: f32[S, 32]
  %0: f32[T, 8] = embed(token_ids, embed.weight: bf16[32, 8], scale=2.82843, first=0)
  %1: bf16[T, 8] = rms_norm(%0, layers.0.attn_norm.weight: f32[8], eps=1e-05)
  %2: bf16[T, 24] = linear(%1, layers.0.attn.q.weight: bf16[24, 8], layers.0.attn.q.bias: bf16[24])
  %3: bf16[T, 12] = linear(%1, layers.0.attn.k.weight: bf16[12, 8])
  %4: bf16[T, 12] = linear(%1, layers.0.attn.v.weight: bf16[12, 8])
  %5: bf16[T, 12] = rms_norm(%3, layers.0.attn.k_norm.weight: f32[12], eps=1e-05)
  %6: bf16[T, 24] = rope(%2, positions, head_dim=12, inv_freq=[1, 0.5, ..., 0.015625], attention_factor=1)
  %7: bf16[T, 12] = rope(%5, positions, head_dim=12, inv_freq=[1, 0.5, ..., 0.015625], attention_factor=1)
  %8: bf16[T, 24] = attention(%6, %7, %4, layer=0, num_heads=2, num_kv_heads=1, head_dim=12, scale=0.25, window=4)
  %9: bf16[T, 8] = linear(%8, layers.0.attn.o.weight: bf16[8, 24])
  %10: f32[T, 8] = add(%0, %9)
  %11: bf16[T, 8] = rms_norm(%10, layers.0.mlp_norm.weight: f32[8], eps=1e-05)
  %12: bf16[T, 16] = linear(%11, layers.0.mlp.gate.weight: bf16[16, 8])
  %13: bf16[T, 16] = linear(%11, layers.0.mlp.up.weight: bf16[16, 8])
  %14: bf16[T, 16] = silu_mul(%12, %13)
  %15: bf16[T, 8] = linear(%14, layers.0.mlp.down.weight: bf16[8, 16])
  %16: f32[T, 8] = add(%10, %15)
  %17: f32[S, 8] = select_rows(%16)
  %18: bf16[S, 8] = rms_norm(%17, norm.weight: f32[8], eps=1e-05)
  %19: f32[S, 32] = lm_head(%18, embed.weight: bf16[32, 8])
  %20: f32[S, 32] = softcap(%19, cap=30)"""


def tiny(dtype: DType = "bfloat16") -> Graph:
    t = Trace(dtype)
    x = t.embed(t.token_ids, "embed", 32, 8, scale=8**0.5)
    h = t.rms_norm(x, "layers.0.attn_norm", eps=1e-5)
    q = t.linear(h, "layers.0.attn.q", 24, bias=True)
    k, v = (t.linear(h, f"layers.0.attn.{name}", 12) for name in "kv")
    k = t.rms_norm(k, "layers.0.attn.k_norm", eps=1e-5, head_dim=12)
    inv_freq = tuple(0.5**i for i in (0, 1, 2, 3, 4, 6))
    q, k = (t.rope(part, head_dim=12, inv_freq=inv_freq) for part in (q, k))
    h = t.attention(q, k, v, layer=0, num_heads=2, num_kv_heads=1, head_dim=12, scale=0.25, window=4)
    x = t.add(x, t.linear(h, "layers.0.attn.o", 8))
    h = t.rms_norm(x, "layers.0.mlp_norm", eps=1e-5)
    gate, up = (t.linear(h, f"layers.0.mlp.{name}", 16) for name in ("gate", "up"))
    x = t.add(x, t.linear(t.silu_mul(gate, up), "layers.0.mlp.down", 8))
    x = t.rms_norm(t.select_rows(x), "norm", eps=1e-5)
    return t.graph(t.softcap(t.lm_head(x, "embed", 32), 30.0))


def test_a_graph_prints_one_node_a_line() -> None:
    assert str(tiny()) == PRINTED


def test_the_activation_dtype_reaches_every_matrix_and_edge_but_norms_the_residual_stream_and_logits() -> None:
    graph = tiny("float32")
    assert {node.output.dtype for node in graph.nodes} == {"float32"}
    floats = [node.op for node in tiny("bfloat16").nodes if node.output.dtype == "float32"]
    assert floats == ["embed", "add", "add", "select_rows", "lm_head", "softcap"]
    halves = {weight.name for weight in tiny("bfloat16").weights.values() if weight.dtype == "bfloat16"}
    assert halves == {name for name in graph.weights if "norm" not in name}


def test_tied_weights_are_listed_once() -> None:
    names = list(tiny().weights)
    assert names[0] == "embed.weight"
    assert names[-1] == "norm.weight"
    assert len(names) == len(set(names)) == 13


def test_kv_shapes_come_from_the_attention_nodes() -> None:
    assert tiny().kv_shapes == {0: (1, 12)}


def layers_of(*kinds: tuple[int | None, int, int]) -> Graph:
    """A layer of (window, KV heads, head_dim) each, all of six query heads."""
    t = Trace("bfloat16")
    x = t.rms_norm(t.embed(t.token_ids, "embed", 32, 96), "norm", eps=1e-5)
    for layer, (window, kv_heads, head_dim) in enumerate(kinds):
        q = t.linear(x, f"{layer}.q", 6 * head_dim)
        k, v = (t.linear(x, f"{layer}.{name}", kv_heads * head_dim) for name in "kv")
        h = t.attention(
            q, k, v, layer=layer, num_heads=6, num_kv_heads=kv_heads, head_dim=head_dim, scale=1.0, window=window
        )
        x = t.linear(h, f"{layer}.o", 96)
    return t.graph(t.lm_head(t.select_rows(x), "embed", 32))


class TestKVGroups:
    LOCAL, GLOBAL = (512, 1, 16), (None, 1, 16)

    def test_layers_of_one_kind_are_one_group(self) -> None:
        assert layers_of(self.GLOBAL, self.GLOBAL).kv_groups == (KVGroup(None, (0, 1)),)
        assert layers_of(self.LOCAL, self.LOCAL).kv_groups == (KVGroup(512, (0, 1)),)

    def test_gemma_3_270m(self) -> None:
        graph = layers_of(*[self.GLOBAL if i % 6 == 5 else self.LOCAL for i in range(18)])
        assert graph.kv_groups == (
            KVGroup(None, (5, 11, 17)),
            KVGroup(512, (0, 1, 2)),
            KVGroup(512, (3, 4, 6)),
            KVGroup(512, (7, 8, 9)),
            KVGroup(512, (10, 12, 13)),
            KVGroup(512, (14, 15, 16)),
        )
        assert graph.kv_block_width == 3 * 2 * 16

    def test_the_last_group_of_a_kind_may_be_smaller(self) -> None:
        """Gemma 3 1B: 22 local layers and 4 global ones."""
        graph = layers_of(*[self.GLOBAL if i % 6 == 5 else self.LOCAL for i in range(26)])
        assert [len(group.layers) for group in graph.kv_groups] == [4, 4, 4, 4, 4, 4, 2]
        assert [group.window for group in graph.kv_groups] == [None] + [512] * 6
        assert sorted(layer for group in graph.kv_groups for layer in group.layers) == list(range(26))

    def test_windows_and_shapes_are_kinds(self) -> None:
        graph = layers_of(self.LOCAL, (256, 1, 16), self.GLOBAL, (None, 2, 16), (None, 1, 32), (None, 1, 32))
        assert graph.kv_groups == (
            KVGroup(None, (2,)),
            KVGroup(None, (3,)),
            KVGroup(None, (4,)),
            KVGroup(None, (5,)),
            KVGroup(512, (0,)),
            KVGroup(256, (1,)),
        )
        assert graph.kv_block_width == 2 * 32


def test_every_op_of_the_vocabulary_can_be_traced() -> None:
    assert all(callable(getattr(Trace, op)) for op in get_args(Op))


@pytest.mark.parametrize(
    ("op", "arguments", "printed"),
    [
        (
            "layer_norm",
            {"name": "n", "eps": 1e-5},
            "%2: bf16[T, 8] = layer_norm(%1, n.weight: f32[8], n.bias: f32[8], eps=1e-05)",
        ),
        ("all_reduce", {}, "%2: bf16[T, 8] = all_reduce(%1)"),
        ("gather", {"widths": (8, 8, 6)}, "%2: bf16[T, 22] = gather(%1, widths=[8, 8, 6])"),
        ("send", {}, "%2: bf16[T, 8] = send(%1)"),
        (
            "moe",
            {"name": "m", "num_experts": 4, "width": 6, "top_k": 2, "norm_topk_prob": True, "activation": "silu"},
            "%2: bf16[T, 8] = moe(%1, m.router.weight: bf16[4, 8], m.gate.weight: bf16[4, 6, 8], "
            "m.up.weight: bf16[4, 6, 8], m.down.weight: bf16[4, 8, 6], top_k=2, norm_topk_prob=True, activation=silu)",
        ),
    ],
)
def test_signatures_of_ops_that_no_model_uses_yet(op: str, arguments: dict[str, Any], printed: str) -> None:
    t = Trace("bfloat16")
    x = t.rms_norm(t.embed(t.token_ids, "embed", 32, 8), "norm", eps=1e-5)
    graph = t.graph(getattr(t, op)(x, **arguments))
    assert str(graph.nodes[2]) == printed


def test_recv_starts_a_pipeline_stage() -> None:
    t = Trace("bfloat16")
    assert str(t.graph(t.recv(8)).nodes[0]) == "%0: f32[T, 8] = recv()"


class TestMistakesInAModel:
    """Each raises ValueError with a message that shows what did not fit."""

    def setup_method(self) -> None:
        self.t = Trace("float32")
        self.x = self.t.embed(self.t.token_ids, "embed", 32, 8)

    def attention(self, k: Value | None = None, **changes: Any) -> Value:
        attrs = {"layer": 0, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "scale": 1.0, **changes}
        return self.t.attention(self.x, self.x if k is None else k, self.x, **attrs)

    def test_unknown_dtype(self) -> None:
        with pytest.raises(ValueError, match="float16"):
            Trace("float16")  # type: ignore[arg-type]

    def test_adding_what_differs(self) -> None:
        with pytest.raises(ValueError, match=r"f32\[T, 8\].*f32\[T, 4\]"):
            self.t.add(self.x, self.t.linear(self.x, "w", 4))
        with pytest.raises(ValueError, match="differ"):
            self.t.add(self.x, self.t.select_rows(self.x))

    def test_the_residual_stream_goes_through_norms_and_adds_alone(self) -> None:
        t = Trace("bfloat16")
        x = t.embed(t.token_ids, "embed", 32, 8)
        h = t.rms_norm(x, "norm", eps=1e-5)
        for mistake in (
            lambda: t.linear(x, "w", 4),
            lambda: t.silu_mul(x, h),
            lambda: t.rope(x, head_dim=4, inv_freq=(1.0,)),
            lambda: t.lm_head(x, "embed", 32),
            lambda: t.add(x, x),
        ):
            with pytest.raises(ValueError, match="a norm must read first"):
                mistake()
        with pytest.raises(ValueError, match="not the residual stream"):
            t.add(h, x)

    def test_one_name_for_two_weights(self) -> None:
        self.t.linear(self.x, "w", 4)
        with pytest.raises(ValueError, match=r"w.weight: f32\[5, 8\] is used as w.weight: f32\[4, 8\]"):
            self.t.linear(self.x, "w", 5)

    def test_a_value_of_another_graph(self) -> None:
        other = Trace("bfloat16")
        with pytest.raises(ValueError, match="does not belong"):
            self.t.rms_norm(other.embed(other.token_ids, "embed", 32, 16), "n", eps=1e-5)

    def test_head_widths(self) -> None:
        with pytest.raises(ValueError, match="3 heads"):
            self.attention(num_heads=3, num_kv_heads=2)
        with pytest.raises(ValueError, match="q is"):
            self.attention(head_dim=8)
        with pytest.raises(ValueError, match="2 heads of 4"):
            self.attention(k=self.t.linear(self.x, "w", 4))
        with pytest.raises(ValueError, match="multiple of 3"):
            self.t.rms_norm(self.x, "n", eps=1e-5, head_dim=3)
        with pytest.raises(ValueError, match="frequencies"):
            self.t.rope(self.x, head_dim=4, inv_freq=(1.0, 0.5, 0.25))

    @pytest.mark.parametrize("change", [{"window": 0}, {"softcap": 0.0}])
    def test_attention_limits_are_positive(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(change))):
            self.attention(**change)

    def test_one_attention_per_layer(self) -> None:
        self.attention()
        with pytest.raises(ValueError, match="layer 0"):
            self.attention()

    def test_rows_are_selected_once_and_after_attention(self) -> None:
        self.x = self.t.select_rows(self.x)
        with pytest.raises(ValueError, match="before select_rows"):
            self.attention()
        with pytest.raises(ValueError, match="already"):
            self.t.select_rows(self.x)

    def test_ids_are_not_activations(self) -> None:
        with pytest.raises(ValueError, match="token id"):
            self.t.embed(self.x, "e", 32, 8)
        with pytest.raises(ValueError, match="no columns"):
            self.t.linear(self.t.positions, "w", 4)


class TestCheckpoints:
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: weight.shape for name, weight in tiny().weights.items()}

    def test_a_checkpoint_that_fits(self) -> None:
        tiny().check_weights(self.shapes())

    def test_a_missing_tensor(self) -> None:
        shapes = self.shapes()
        del shapes["layers.0.attn.q.bias"]
        with pytest.raises(ModelError, match=r"layers.0.attn.q.bias of shape \(24,\) is missing"):
            tiny().check_weights(shapes)

    def test_another_shape(self) -> None:
        shapes = self.shapes() | {"norm.weight": (9,)}
        with pytest.raises(ModelError, match=r"norm.weight has shape \(9,\).*\(8,\)"):
            tiny().check_weights(shapes)

    def test_tensors_without_a_place(self) -> None:
        shapes = self.shapes() | {"layers.0.attn.k.bias": (12,), "layers.1.attn.k.bias": (12,)}
        with pytest.raises(ModelError, match=r"2 tensors.*layers.0.attn.k.bias of shape \(12,\)"):
            tiny().check_weights(shapes)
