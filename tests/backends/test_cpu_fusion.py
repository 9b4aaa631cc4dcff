"""What fusion makes of a model's graph. That it changes no bit is tested in test_cpu_bits.py."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from octavo.backends.cpu.fusion import fuse, fuse_gates, fuse_residuals, merge_projections
from octavo.backends.cpu.steps import Matmul, Step, with_matmuls
from octavo.config import ModelConfig
from octavo.graph import Trace, Value
from octavo.models import build_graph
from tests.models.test_families import CONFIG

ALIKE: dict[str, str] = defaultdict(lambda: "bfloat16")  # how each weight is held


def kinds(steps: list[Step]) -> Counter[str]:
    return Counter(f"{step.epilogue} of {len(step.parts)}" if isinstance(step, Matmul) else step.op for step in steps)


def fused(config: ModelConfig) -> list[Step]:
    return fuse(list(with_matmuls(build_graph(config, "bfloat16").nodes)), ALIKE)


def test_llama() -> None:
    """Four products a layer: q, k and v; o and residual; gate, up and silu; down and residual."""
    assert kinds(fused(CONFIG)) == {
        "embed": 1, "rms_norm": 5, "store of 3": 2, "rope": 4, "attention": 2, "add of 1": 4, "silu_mul of 2": 2,
        "select_rows": 1, "lm_head": 1,
    }  # fmt: skip


def test_gemma3() -> None:
    """Norms stand before its residuals, so those stay by themselves."""
    config = replace(CONFIG, family="gemma3", activation="gelu_tanh")
    assert kinds(fused(config)) == {
        "embed": 1, "rms_norm": 13, "store of 3": 2, "rope": 4, "attention": 2, "store of 1": 4, "add": 4,
        "gelu_mul of 2": 2, "select_rows": 1, "lm_head": 1,
    }  # fmt: skip


def test_values_stay_what_they_were() -> None:
    """Every value that some step reads is written before, by one step, at the width that the graph gives it."""
    for family in ("llama", "gemma3"):
        written = {"token_ids", "positions"}
        for step in fused(replace(CONFIG, family=family)):
            assert {value.name for value in step.inputs} <= written
            outputs = step.outputs if isinstance(step, Matmul) else ((step.output, 0),)
            names = {value.name for value, _ in outputs}
            assert not names & written
            written |= names


def test_parts_of_a_product_never_overlap() -> None:
    for family in ("llama", "gemma3"):
        for step in fused(replace(CONFIG, family=family, num_kv_heads=1)):  # k and v are 16 wide: not a multiple of 32
            if isinstance(step, Matmul):
                panels = [p.first_panel + i * p.panel_step for p in step.parts for i in range(p.panels)]
                assert len(panels) == len(set(panels))
                assert all(column % 32 == 0 for _, column in step.outputs)


def embedded(t: Trace) -> tuple[Value, Value]:
    """A residual stream, and its norm."""
    x = t.embed(t.token_ids, "embed", 8, 32)
    return x, t.rms_norm(x, "norm", eps=1e-6)


def test_a_gate_that_is_read_twice_is_not_fused() -> None:
    t = Trace("bfloat16")
    x, h = embedded(t)
    gate, up = t.linear(h, "gate", 32), t.linear(h, "up", 32)
    graph = t.graph(t.add(t.add(x, t.silu_mul(gate, up)), gate))
    assert kinds(fuse_gates(list(with_matmuls(graph.nodes)), ALIKE)) == {
        "embed": 1, "rms_norm": 1, "store of 1": 2, "silu_mul": 1, "add": 2
    }  # fmt: skip


def test_gates_of_different_inputs_are_not_fused() -> None:
    t = Trace("bfloat16")
    _, h = embedded(t)
    y = t.rms_norm(h, "norm2", eps=1e-6)
    graph = t.graph(t.silu_mul(t.linear(h, "gate", 32), t.linear(y, "up", 32)))
    assert "silu_mul" in kinds(fuse_gates(list(with_matmuls(graph.nodes)), ALIKE))


def test_a_product_is_added_to_the_stream_where_it_is_made() -> None:
    t = Trace("bfloat16")
    x, h = embedded(t)
    graph = t.graph(t.add(x, t.linear(h, "o", 32)))
    (step,) = (step for step in fuse_residuals(list(with_matmuls(graph.nodes))) if isinstance(step, Matmul))
    assert (step.epilogue, step.residual) == ("add", x)


def test_a_product_that_is_added_twice_stays() -> None:
    t = Trace("bfloat16")
    x, h = embedded(t)
    y = t.linear(h, "a", 32)
    graph = t.graph(t.add(t.add(x, y), y))
    assert kinds(fuse_residuals(list(with_matmuls(graph.nodes)))) == {
        "embed": 1, "rms_norm": 1, "store of 1": 1, "add": 2
    }  # fmt: skip


def test_only_products_of_one_input_are_merged() -> None:
    t = Trace("bfloat16")
    x, h = embedded(t)
    y = t.rms_norm(h, "norm2", eps=1e-6)
    graph = t.graph(t.add(t.add(x, t.linear(h, "a", 32)), t.linear(y, "b", 32)))
    assert kinds(merge_projections(list(with_matmuls(graph.nodes)), ALIKE))["store of 1"] == 2


def test_products_that_are_held_unlike_stay_apart() -> None:
    """One packed weight has one width: v in more bits than q and k, and an up that differs from its gate."""
    nodes = build_graph(CONFIG, "bfloat16").nodes
    widths = {weight.name: "Q5_0" for node in nodes for weight in node.weights}
    widths["layers.0.attn.v.weight"] = "Q8_0"
    widths["layers.1.mlp.up.weight"] = "Q6_K"
    found = kinds(fuse(list(with_matmuls(nodes)), widths))
    assert found["store of 2"] == 1  # q and k of layer 0
    assert found["store of 3"] == 1
    assert found["silu_mul of 2"] == found["silu_mul"] == 1
    # v of layer 0, and gate and up of layer 1, which both read one norm but are held unlike
    assert found["store of 1"] == 3
