"""What a decode step costs against context length and batch, with the model that explains it.

Straight on the cpu backend: no scheduler, no text. The KV cache is filled with random values first (pages that were
never written would all be one page of zeros, and in the cache). Each cell is the fastest of several steps.

The model has three parameters, each with a meaning, fitted by least squares over the relative error:

    seconds = max(weights / bandwidth, batch * FLOPs per token / peak)  +  batch * context * KV bytes / kv_bandwidth

    python benchmarks/decode_cost.py MODEL [--num-threads N] [--fast-math] [--kv-cache-dtype int8] [--json FILE] ...
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Batch
from octavo.backends.cpu import CpuBackend
from octavo.models import build_graph, model_config
from octavo.weights import open_checkpoint, resolve_model

BLOCK = 16
CONTEXTS = (16, 256, 512, 1024, 2048, 4096, 8191)  # at batches 1 and 8
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # at contexts 16 and 1024
REPEATS = 7


def load(model: str, options: argparse.Namespace) -> tuple[CpuBackend, int, int]:
    """The backend, its vocabulary, and the FLOPs of the weights per token."""
    checkpoint = open_checkpoint(resolve_model(model))
    graph = build_graph(model_config(checkpoint.config, checkpoint.generation_config), "bfloat16")
    backend = CpuBackend(
        graph, checkpoint.tensors, quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype,
        block_size=BLOCK, num_threads=options.num_threads, vocab_size=graph.output.width or 0,
        fast_math=options.fast_math,
    )  # fmt: skip
    products = [node for node in graph.nodes if node.op in ("linear", "lm_head")]
    return backend, graph.output.width or 0, sum(2 * int(np.prod(node.weights[0].shape)) for node in products)


def decode_batch(rng: np.random.Generator, vocabulary: int, tables: NDArray[np.int32], context: int) -> Batch:
    """One new token for each sequence, at position `context`; tables [groups of layers, sequences, blocks]."""
    count = tables.shape[1]
    return Batch(
        token_ids=rng.integers(0, vocabulary, count).astype(np.int32),
        positions=np.full(count, context, np.int32),
        slot_mapping=tables[:, :, context // BLOCK].astype(np.int64) * BLOCK + context % BLOCK,
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, context + 1, np.int32),
        block_tables=np.ascontiguousarray(tables[:, :, : context // BLOCK + 1]),
        logit_rows=np.arange(count, dtype=np.int32),
    )


def fill(backend: CpuBackend, rng: np.random.Generator) -> None:
    numbers = (rng.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes = rng.integers(0, 256, 1 << 20).astype(np.uint8)
    for cache in backend.kv_caches():
        for part in cache:
            some = numbers if part.itemsize == 2 else codes
            for block in part:
                start = rng.integers(len(some) - block.size)
                block[...] = some[start : start + block.size].reshape(block.shape)
            if part.itemsize == 1:
                part[..., -64:] = np.full(16, 0.02, np.float32).view(np.uint8)  # the scales


def fastest_step(backend: CpuBackend, batch: Batch) -> float:
    backend.logits(batch)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        backend.logits(batch)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(backend: CpuBackend, vocabulary: int) -> list[tuple[int, int, float]]:
    """(batch, context, seconds) of each cell."""
    cells = sorted({(b, c) for b in (1, 8) for c in CONTEXTS} | {(b, c) for b in BATCHES for c in (16, 1024)})
    groups = len(backend.kv_groups)
    num_blocks = groups * max(b * (c // BLOCK + 1) for b, c in cells)
    backend.allocate_kv_cache(num_blocks)
    rng = np.random.default_rng(0)
    fill(backend, rng)
    blocks = rng.permutation(num_blocks).astype(np.int32)
    results = []
    for batch, context in cells:
        tables = blocks[: groups * batch * (context // BLOCK + 1)].reshape(groups, batch, -1)
        results.append((batch, context, fastest_step(backend, decode_batch(rng, vocabulary, tables, context))))
        print(f"batch {batch:3d}  context {context:5d}  {results[-1][2] * 1e3:9.2f} ms", flush=True)
    return results


class Model:
    """The model above. `fit` scans its parameters over a grid of factors, coarse to fine: three are few."""

    def __init__(self, weight_bytes: int, flops_per_token: int, kv_bytes: int) -> None:
        self.sizes = weight_bytes, flops_per_token, kv_bytes
        self.parameters = np.array([20e9, 200e9, 20e9])  # bytes/s, FLOP/s, bytes/s

    def seconds(self, batch: float, context: float, parameters: NDArray[np.float64] | None = None) -> float:
        bandwidth, peak, kv_bandwidth = self.parameters if parameters is None else parameters
        weights, flops, kv = self.sizes
        return float(max(weights / bandwidth, batch * flops / peak) + batch * (context + 1) * kv / kv_bandwidth)

    def error(self, cells: list[tuple[int, int, float]], parameters: NDArray[np.float64]) -> float:
        return sum((self.seconds(b, c, parameters) / seconds - 1) ** 2 for b, c, seconds in cells)

    def fit(self, cells: list[tuple[int, int, float]]) -> None:
        for step in (2.0, 1.4, 1.1, 1.03, 1.01):
            for _ in range(40):
                factors = [np.array(f) for f in np.ndindex(3, 3, 3)]
                tried = [self.parameters * step ** (f - 1.0) for f in factors]
                best = min(tried, key=lambda parameters: self.error(cells, parameters))
                if np.allclose(best, self.parameters):
                    break
                self.parameters = best


def plot(path: Path, cells: list[tuple[int, int, float]], model: Model, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for batch, color in ((1, "tab:blue"), (8, "tab:orange")):
        points = [(c, s * 1e3) for b, c, s in cells if b == batch and c in CONTEXTS]
        left.plot(*zip(*points, strict=True), "o", color=color, label=f"batch {batch}")
        line = np.linspace(0, 8191, 50)
        left.plot(line, [model.seconds(batch, c) * 1e3 for c in line], color=color, linewidth=1)
    for context, color in ((16, "tab:green"), (1024, "tab:red")):
        points = [(b, s * 1e3) for b, c, s in cells if c == context and b in BATCHES]
        right.plot(*zip(*points, strict=True), "o", color=color, label=f"context {context}")
        line = np.linspace(1, 64, 64)
        right.plot(line, [model.seconds(b, context) * 1e3 for b in line], color=color, linewidth=1)
    for axes, label in ((left, "tokens in the context"), (right, "sequences in the batch")):
        axes.set(xlabel=label, ylabel="ms a step", ylim=(0, None))
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}: measured (dots) and modelled (lines)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--fast-math", action="store_true")
    parser.add_argument("--quantization", choices=("none", "int8"), help="of the weights; the file's own width")
    parser.add_argument("--kv-cache-dtype", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--png", type=Path, help="plot them into this file")
    args = parser.parse_args()

    backend, vocabulary, flops = load(args.model, args)
    print(backend.description)
    cells = measure(backend, vocabulary)
    model = Model(backend.weight_bytes, flops, backend.kv_bytes_per_token)
    model.fit(cells)
    bandwidth, peak, kv_bandwidth = (float(x) / 1e9 for x in model.parameters)
    errors = [abs(model.seconds(b, c) / s - 1) for b, c, s in cells]
    print(f"weights {bandwidth:.1f} GB/s, products {peak:.0f} GFLOP/s, keys and values {kv_bandwidth:.1f} GB/s")
    print(f"the model is off by {np.mean(errors):.1%} on average, {max(errors):.1%} at most")
    if args.json:
        record = {
            "backend": backend.description, "weight_bytes": backend.weight_bytes, "flops_per_token": flops,
            "kv_bytes_per_token": backend.kv_bytes_per_token,
            "weights_gb_per_s": bandwidth, "products_gflop_per_s": peak, "kv_gb_per_s": kv_bandwidth,
            "mean_error": float(np.mean(errors)), "largest_error": float(max(errors)),
            "cells": [{"batch": b, "context": c, "ms": s * 1e3} for b, c, s in cells],
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.png:
        plot(args.png, cells, model, "A decode step")


if __name__ == "__main__":
    main()
