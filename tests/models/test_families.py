"""What the families' build functions put into the graph, beside what logits already show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.config import LayerConfig, ModelConfig, RopeConfig
from octavo.graph import Graph
from octavo.models import FAMILIES, build_graph

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position=128,
    layers=(LayerConfig(RopeConfig(16, 1e4), window=8), LayerConfig(RopeConfig(16, 1e6))),
    attention_scale=0.125,
)


def attrs(graph: Graph, op: str, name: str) -> list[Any]:
    return [node.attrs[name] for node in graph.nodes if node.op == op]


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_layers_keep_their_window_scale_cap_and_rope(self, family: str) -> None:
        graph = build_graph(replace(CONFIG, family=family, attention_softcap=50.0, logit_softcap=30.0), "float32")
        assert attrs(graph, "attention", "layer") == [0, 1]
        assert attrs(graph, "attention", "window") == [8, None]
        assert attrs(graph, "attention", "scale") == [0.125, 0.125]
        assert attrs(graph, "attention", "softcap") == [50.0, 50.0]
        assert attrs(graph, "softcap", "cap") == [30.0]
        second = [inv_freq[1] for inv_freq in attrs(graph, "rope", "inv_freq")]  # of q and k, layer by layer
        assert second == pytest.approx([theta ** (-2 / 16) for theta in (1e4, 1e4, 1e6, 1e6)], rel=1e-6)

    def test_rows_are_selected_before_the_final_norm(self, family: str) -> None:
        graph = build_graph(replace(CONFIG, family=family), "bfloat16")
        assert [node.op for node in graph.nodes[-3:]] == ["select_rows", "rms_norm", "lm_head"]
        assert str(graph.output).endswith("f32[S, 64]")

    def test_the_activation_is_the_configured_one(self, family: str) -> None:
        for activation, op in (("silu", "silu_mul"), ("gelu_tanh", "gelu_mul")):
            graph = build_graph(replace(CONFIG, family=family, activation=activation), "float32")
            assert {node.op for node in graph.nodes if node.op.endswith("_mul")} == {op}

    def test_tied_embeddings_need_no_head(self, family: str) -> None:
        assert "lm_head.weight" in build_graph(replace(CONFIG, family=family), "float32").weights
        tied = build_graph(replace(CONFIG, family=family, tie_embeddings=True), "float32")
        assert "lm_head.weight" not in tied.weights
