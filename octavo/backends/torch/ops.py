"""One function per op: `function(step, *inputs, *weights, **attrs)`. Each computes in float32 and rounds once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from octavo.backends.torch.attention import paged_attention
from octavo.backends.torch.exchange import all_reduce, gather, recv, send
from octavo.backends.torch.step import AttentionShape, Step


def embed(step: Step, ids: torch.Tensor, weight: torch.Tensor, *, scale: float, first: int) -> torch.Tensor:
    row = ids - first
    mine = (row >= 0) & (row < len(weight))
    rows = F.embedding(torch.where(mine, row, 0), weight).float() * mine[:, None]
    return rows * torch.tensor(scale, dtype=weight.dtype).float()


def select_rows(step: Step, x: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, step.logit_rows)


def linear(step: Step, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def partial_linear(step: Step, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product over some of the columns, in float32."""
    y = _float_product(x, weight)
    return y if bias is None else y + bias.float()


def rms_norm(step: Step, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    groups = x.view(len(x), x.shape[1] // len(weight), len(weight))  # one, or one per head; there may be no row
    return F.rms_norm(groups.float(), weight.shape, weight, eps).to(step.dtype).view_as(x)


def rope(
    step: Step,
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    head_dim: int,
    inv_freq: tuple[float, ...],
    attention_factor: float,
) -> torch.Tensor:
    cos, sin = step.rotation(inv_freq, attention_factor)
    n = len(inv_freq)
    heads = x.view(len(x), -1, head_dim).float()
    a, b, rest = heads[..., :n], heads[..., n : 2 * n], heads[..., 2 * n :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype).view_as(x)


def attention(
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    cache = step.caches[layer]
    cache.store(step.rows(cache), k, v)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, window, cache.group, cache.rows_per_block)
    return paged_attention(step.pieces(shape), q, cache, scale=scale, softcap=softcap)


def silu_mul(step: Step, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate.float()) * up).to(gate.dtype)


def gelu_mul(step: Step, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.gelu(gate.float(), approximate="tanh") * up).to(gate.dtype)


def add(step: Step, stream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return stream + x


def lm_head(step: Step, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _float_product(x, weight)


def _float_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, not rounded from float32 to what the two are."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    if weight.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    # torch's CPU product of bfloat16 rounds its result to bfloat16, so the weight is widened, a part at a time.
    parts = [F.linear(x.float(), part.float()) for part in torch.split(weight, 4096)]
    return torch.cat(parts, dim=1)


def softcap(step: Step, x: torch.Tensor, *, cap: float) -> torch.Tensor:
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


OPS: Mapping[str, Callable[..., torch.Tensor]] = {
    function.__name__: function
    for function in (
        embed, select_rows, linear, partial_linear, rms_norm, rope, attention, silu_mul, gelu_mul, add, lm_head,
        softcap, all_reduce, gather, send, recv,
    )
}  # fmt: skip
