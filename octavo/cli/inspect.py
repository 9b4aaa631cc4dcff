"""`octavo inspect`: what a model is, without loading its weights."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.cli.fetch import fetch
from octavo.config import DEMO_MODEL, ModelConfig
from octavo.models import build_graph, model_config
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import Checkpoint, open_checkpoint


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "inspect",
        help="show what a model is",
        description="Shows a model's configuration, tokeniser and tensors without loading its weights.",
    )
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, metavar="M", help=f"(default: {DEMO_MODEL})")
    parser.add_argument("--graph", action="store_true", help="print the graph, one op a line")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(fetch(args.model))
    model = model_config(checkpoint.config, checkpoint.generation_config)
    if args.graph:
        print(build_graph(model, "float32"))
        return 0
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.metadata, checkpoint.config, checkpoint.generation_config)
    facts = _facts(checkpoint, model, tokenizer)
    if args.json:
        tensors = {
            name: {"shape": t.shape, "type": t.dtype, "bytes": t.nbytes} for name, t in checkpoint.tensors.items()
        }
        print(json.dumps({**facts, "config": asdict(model), "tensors": tensors}, indent=1, ensure_ascii=False))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    console.print(_tensor_table(checkpoint, each=args.tensors))
    return 0


def _facts(checkpoint: Checkpoint, model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    windows = sorted({layer.window for layer in model.layers if layer.window is not None})
    windowed = sum(layer.window is not None for layer in model.layers)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "family": model.family,
        "parameters": sum(_count(tensor.shape) for tensor in checkpoint.tensors.values()),
        "bytes": checkpoint.nbytes,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "heads": f"{model.num_heads} query, {model.num_kv_heads} key-value, {model.head_dim} wide",
        "context": model.max_position,
        "sliding_window": f"{windows[0]} in {windowed} of {model.num_layers} layers" if windows else None,
        "rope": ", ".join(sorted({f"{layer.rope.kind} (theta {layer.rope.theta:g})" for layer in model.layers})),
        "vocabulary": f"{tokenizer.vocab_size} tokens, {model.vocab_size} rows",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "kv_bytes_per_token": _kv_bytes(model),
        "chat_templates": ", ".join(tokenizer.chat_templates) or None,
        "unused_tensors": checkpoint.unused,
    }


def _tensor_table(checkpoint: Checkpoint, *, each: bool) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    if each:
        for column in ("tensor", "type", "shape"):
            table.add_column(column)
        for name, tensor in checkpoint.tensors.items():
            table.add_row(name, tensor.dtype, " x ".join(map(str, tensor.shape)))
        return table
    by_type: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in checkpoint.tensors.values():
        row = by_type[tensor.dtype]
        row[0] += 1
        row[1] += _count(tensor.shape)
        row[2] += tensor.nbytes
    table.add_column("type")
    for column in ("tensors", "parameters", "bytes"):
        table.add_column(column, justify="right")
    for kind, (tensors, parameters, nbytes) in sorted(by_type.items()):
        table.add_row(kind, str(tensors), f"{parameters:,}", f"{nbytes:,}")
    return table


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _kv_bytes(model: ModelConfig) -> str:
    heads, head_dim = 2 * model.num_layers * model.num_kv_heads, model.head_dim
    in_int8 = heads * (head_dim + 4)  # with a float32 scale
    return f"{heads * head_dim * 2} in bfloat16, {heads * head_dim * 4} in float32, {in_int8} in int8"
