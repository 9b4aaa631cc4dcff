"""Graphs of whole models, without a checkpoint."""

from __future__ import annotations

from octavo.graph import DType, Graph, Trace


def decoder(
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    inner: int,
    vocab: int,
    tied: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (None,),
    dtype: DType = "bfloat16",
) -> Graph:
    """A model of the shape of Llama's; with `qk_norm` and a window, of Gemma's."""
    t = Trace(dtype)
    x = t.embed(t.token_ids, "embed", vocab, hidden)
    for i in range(layers):
        h = t.rms_norm(x, f"{i}.attn_norm", eps=1e-5)
        q = t.linear(h, f"{i}.q", heads * head_dim, bias=bias)
        k = t.linear(h, f"{i}.k", kv_heads * head_dim, bias=bias)
        v = t.linear(h, f"{i}.v", kv_heads * head_dim, bias=bias)
        if qk_norm:
            q, k = (
                t.rms_norm(value, f"{i}.{name}_norm", eps=1e-5, head_dim=head_dim)
                for name, value in (("q", q), ("k", k))
            )
        q, k = (t.rope(value, head_dim=head_dim, inv_freq=(1.0, 0.5)) for value in (q, k))
        h = t.attention(
            q, k, v, layer=i, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.25,
            window=windows[i % len(windows)],
        )  # fmt: skip
        x = t.add(x, t.linear(h, f"{i}.o", hidden, bias=bias))
        h = t.rms_norm(x, f"{i}.mlp_norm", eps=1e-5)
        inside = t.silu_mul(t.linear(h, f"{i}.gate", inner), t.linear(h, f"{i}.up", inner))
        x = t.add(x, t.linear(inside, f"{i}.down", hidden, bias=bias))
    x = t.rms_norm(t.select_rows(x), "norm", eps=1e-5)
    return t.graph(t.softcap(t.lm_head(x, "embed" if tied else "head", vocab), 30.0))
