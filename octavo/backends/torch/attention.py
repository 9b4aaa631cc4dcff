"""Paged attention in plain torch."""

from __future__ import annotations

import torch

from octavo.backends.torch.step import KVCache, Piece, rows_of


def paged_attention(
    pieces: list[Piece], q: torch.Tensor, cache: KVCache, *, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax attention of q [T, num_heads * head_dim] over what the pieces name; computed in float32."""
    num_kv_heads, head_dim = cache.keys.shape[2:]
    group = q.shape[1] // (num_kv_heads * head_dim)
    out = torch.empty_like(q)
    for piece in pieces:
        n = piece.num_sequences
        queries = q[piece.rows].float().view(n, -1, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        m = queries.shape[3]
        # A KV head's queries, of all heads in its group and all rows, are the rows of one matrix.
        scores = torch.bmm(queries.reshape(n * num_kv_heads, group * m, head_dim), _gather(cache.keys, piece).mT)
        scores = _weights(scores.view(n, num_kv_heads, group, m, -1), piece.hidden, scale, softcap)
        result = torch.bmm(scores.view(n * num_kv_heads, group * m, -1), _gather(cache.values, piece))
        result = result.view(n, num_kv_heads, group, m, head_dim).permute(0, 3, 1, 2, 4)
        out[piece.rows] = result.reshape(n * m, -1).to(q.dtype)
    return out


def _gather(cache: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Keys or values of a piece: float32 [n * num_kv_heads, L, head_dim]."""
    num_kv_heads, head_dim = cache.shape[2:]
    rows = rows_of(cache, head_dim).index_select(0, piece.slots)
    return rows.view(piece.num_sequences * num_kv_heads, -1, head_dim).float()


def _weights(scores: torch.Tensor, hidden: torch.Tensor | None, scale: float, softcap: float | None) -> torch.Tensor:
    """From products of q and k to the softmax over the positions that are seen."""
    scores.mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)
