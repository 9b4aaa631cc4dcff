"""Quality of runs in few bits: each configuration against the file's weights expanded to float32.

The text is `data/persuasion.txt`, checked by its SHA-256 (data/README.md says where it is from). Its token ids are cut
into windows of `--context` tokens; the last one is what is left. Where the tokeniser puts a BOS before a text, each
window is one token shorter and gets a BOS. Each window is computed on its own, and each of its tokens but the first is
scored: the natural logarithm of its probability after the tokens before it in the window.

    perplexity     exp(-mean logprob)
    ratio          of perplexity to the oracle's; ± is its standard error, the tokens' differences taken as independent
    |Δ| mean, max  of the logprob of the token that stands there, to the oracle's
    same argmax    share of places where both hold the same token for the most likely

The oracle is the torch backend in float32 with `quantization="none"`. Other configurations are names of `PRESETS` and
options of `octavo.LLM`, joined with plus signs: `file`, `file+bf16act`, `int8+kv_cache_dtype=int8`. The oracle's result
stays in the temporary directory, and is found again while model, windows and the oracle's own code are the same.

    python benchmarks/perplexity.py --model M [--configs file,bf16,...] [--llama-cpp VENV/bin/python] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers.machine import facts
from rich.console import Console
from rich.progress import track
from rich.table import Table

import octavo
from octavo import LLM, SamplingParams
from octavo.config import DEMO_MODEL, engine_config
from octavo.errors import ConfigError
from octavo.outputs import PositionLogprobs
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import open_checkpoint, resolve_model

HERE = Path(__file__).parent
TEXT = HERE / "data" / "persuasion.txt"
TEXT_SHA256 = "6c0081ea83f11372df553a2956939dbc298d434042e1b69a7f8f162a461f1078"

ORACLE, LLAMA_CPP = "oracle", "llama.cpp"
ORACLE_CODE = ("backends/torch", "graph", "models", "sampling", "weights")  # what its figures come from, below octavo/
PRESETS: dict[str, dict[str, Any]] = {
    ORACLE: {"backend": "torch", "device": "cpu", "dtype": "float32", "quantization": "none"},
    "file": {},  # the defaults
    "bf16": {"quantization": "none"},
    "int8": {"quantization": "int8"},
    "bf16act": {"activation_dtype": "bfloat16"},
    "int16act": {"activation_dtype": "int16"},
    "int8kv": {"kv_cache_dtype": "int8"},
}


@dataclass(frozen=True)
class Scores:
    """Of the scored tokens of all windows, in order."""

    logprobs: NDArray[np.float64]  # [tokens], natural logarithms
    argmax: NDArray[np.int64]  # [tokens]
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs.mean()))


def ratio(scores: Scores, other: Scores) -> tuple[float, float]:
    """Of the perplexities, and its standard error."""
    delta = scores.logprobs - other.logprobs
    value = float(np.exp(-delta.mean()))
    return value, value * float(delta.std(ddof=1)) / len(delta) ** 0.5


def compare(scores: Scores, oracle: Scores, llama_cpp: Scores | None) -> dict[str, float]:
    """The figures of one configuration."""
    delta = scores.logprobs - oracle.logprobs
    to_oracle, error = ratio(scores, oracle)
    figures = {"perplexity": scores.perplexity, "ratio": to_oracle, "ratio_error": error}
    if llama_cpp is not None:
        figures["ratio_to_llama_cpp"], figures["ratio_to_llama_cpp_error"] = ratio(scores, llama_cpp)
    return figures | {
        "mean_abs_delta": float(np.abs(delta).mean()),
        "max_abs_delta": float(np.abs(delta).max()),
        "same_argmax": float((scores.argmax == oracle.argmax).mean()),
        "seconds": scores.seconds,
    }


def parse_config(text: str) -> dict[str, Any]:
    """The options of `octavo.LLM` behind names and `option=value`, joined with plus signs; later ones win.

    Raises:
        ConfigError: there is no such name.
    """
    options: dict[str, Any] = {}
    for part in text.split("+"):
        name, is_option, value = part.partition("=")
        if is_option:
            options[name] = int(value) if value.isdecimal() else value
        elif part in PRESETS:
            options |= PRESETS[part]
        else:
            raise ConfigError(f"configuration {part!r}: expected option=value or one of {', '.join(PRESETS)}")
    return options


def cut(tokens: list[int], context: int, prefix: list[int]) -> list[list[int]]:
    """Windows of `context` tokens, each with the prefix before its part of the text; every part but the last is full.

    A last window that has nothing to score is left out.
    """
    step = context - len(prefix)
    windows = [prefix + tokens[i : i + step] for i in range(0, len(tokens), step)]
    return windows if len(windows[-1]) > 1 else windows[:-1]


def scored(window: list[int], prompt_logprobs: list[PositionLogprobs | None]) -> Iterator[tuple[float, int]]:
    """Logprob of each token but the first, and the most likely token at its place; of equals the smaller id."""
    for token, entry in zip(window[1:], prompt_logprobs[1:], strict=True):
        if entry is None:
            raise ValueError("a token after the first has no logprobs")
        yield entry[token].logprob, max(entry, key=lambda id: (entry[id].logprob, -id))


def read_text() -> str:
    data = TEXT.read_bytes()
    if hashlib.sha256(data).hexdigest() != TEXT_SHA256:
        raise ValueError(f"{TEXT.name} is not the text that it was: its SHA-256 is not {TEXT_SHA256}")
    return data.decode()


def read_tokenizer(model: str) -> Tokenizer:
    checkpoint = open_checkpoint(resolve_model(model))
    return load_tokenizer(checkpoint.path, checkpoint.metadata, checkpoint.config, checkpoint.generation_config)


# ---- who scores ------------------------------------------------------------------------------------------------------


def octavo_scores(name: str, model: str, options: dict[str, Any], windows: list[list[int]]) -> Scores:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0)
    context = max(map(len, windows))
    rows: list[tuple[float, int]] = []
    with LLM(model, **engine_options(options, context)) as llm:
        start = time.perf_counter()
        for window in track(windows, description=f"{name:<16}", console=Console(stderr=True)):
            (output,) = llm.generate({"prompt_token_ids": window}, params, progress=False)
            rows += scored(window, output.prompt_logprobs or [])
        return _scores(rows, time.perf_counter() - start)


def engine_options(options: dict[str, Any], context: int) -> dict[str, Any]:
    """A context of one window, and nothing kept from another."""
    return options | {"max_model_len": context, "enable_prefix_caching": False}


def oracle_scores(model: str, windows: list[list[int]], threads: int) -> Scores:
    """The oracle's scores, from the temporary directory if they are there."""
    path = Path(tempfile.gettempdir()) / "octavo-perplexity" / f"{_oracle_key(model, windows)}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as stored:
            return Scores(stored["logprobs"], stored["argmax"], float(stored["seconds"]))
    scores = octavo_scores(ORACLE, model, PRESETS[ORACLE] | {"num_threads": threads}, windows)
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(scratch, logprobs=scores.logprobs, argmax=scores.argmax, seconds=scores.seconds)
    scratch.replace(path)
    return scores


def _oracle_key(model: str, windows: list[list[int]]) -> str:
    digest = hashlib.sha256(json.dumps([PRESETS[ORACLE], windows]).encode())
    package = Path(octavo.__file__).parent
    sources = [path for folder in ORACLE_CODE for path in sorted((package / folder).rglob("*.py"))]
    place = resolve_model(model)
    weights = [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file())
    for path in sources + weights:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def llama_cpp_scores(python: Path, model: str, windows: list[list[int]], threads: int) -> tuple[Scores, dict[str, str]]:
    """llama.cpp's scores by the same rule, from a process of its own environment, and its version."""
    gguf = open_checkpoint(resolve_model(model))
    if gguf.format != "gguf":
        raise ConfigError(f"--llama-cpp: {model} is in {gguf.format}; llama.cpp reads GGUF files")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = HERE / "peers" / "llama_cpp_perplexity.py"
    command = [str(python), str(script), "--model", str(gguf.path), "--threads", str(threads)]
    start = time.perf_counter()
    with Console(stderr=True).status("llama.cpp"):
        process = subprocess.run(
            command, input=json.dumps({"windows": windows}), stdout=subprocess.PIPE, text=True, check=True, env=env
        )
    answer = json.loads(process.stdout)
    pairs = zip(answer["logprobs"], answer["argmax"], strict=True)
    rows = [row for logprobs, argmax in pairs for row in zip(logprobs, argmax, strict=True)]
    return _scores(rows, time.perf_counter() - start), answer["versions"]


def _scores(rows: list[tuple[float, int]], seconds: float) -> Scores:
    logprobs, argmax = zip(*rows, strict=True)
    return Scores(np.array(logprobs, np.float64), np.array(argmax, np.int64), seconds)


# ---- the command -----------------------------------------------------------------------------------------------------


def report(title: str, figures: dict[str, dict[str, float]]) -> None:
    table = Table(title=title)
    beside_llama_cpp = LLAMA_CPP in figures
    columns = ["configuration", "perplexity", "ratio", "±", *(["to llama.cpp"] if beside_llama_cpp else [])]
    for column in (*columns, "|Δ| mean", "|Δ| max", "same argmax", "s"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for name, row in figures.items():
        table.add_row(
            name,
            f"{row['perplexity']:.4f}",
            f"{row['ratio']:.5f}",
            f"{row['ratio_error']:.5f}",
            *([f"{row['ratio_to_llama_cpp']:.5f}"] if beside_llama_cpp else []),
            f"{row['mean_abs_delta']:.5f}",
            f"{row['max_abs_delta']:.3f}",
            f"{100 * row['same_argmax']:.2f} %",
            f"{row['seconds']:.0f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--configs", default="file,file+int16act,file+bf16act,bf16,int8", help="comma-separated")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="only the first so many; all")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="of an environment with llama-cpp-python")
    parser.add_argument("--json", type=Path, help="write the figures and the machine's facts to this file")
    args = parser.parse_args()

    tokenizer = read_tokenizer(args.model)
    windows = cut(tokenizer.encode(read_text(), add_special_tokens=False), args.context, tokenizer.encode(""))
    windows = windows[: args.windows]
    configs = {
        name: {"num_threads": args.threads} | parse_config(name) for name in args.configs.split(",") if name != ORACLE
    }
    for options in configs.values():  # refused before anything runs
        engine_config(args.model, engine_options(options, args.context))

    machine = facts(HERE.parent) if args.json else {}
    oracle = oracle_scores(args.model, windows, args.threads)
    runs = {ORACLE: oracle}
    versions: dict[str, str] = {}
    if args.llama_cpp:
        runs[LLAMA_CPP], versions = llama_cpp_scores(args.llama_cpp, args.model, windows, args.threads)
    for name, options in configs.items():
        runs[name] = octavo_scores(name, args.model, options, windows)
    figures = {name: compare(scores, oracle, runs.get(LLAMA_CPP)) for name, scores in runs.items()}

    count = len(oracle.logprobs)
    report(f"{Path(args.model).name}: {count} tokens scored in {len(windows)} windows of {args.context}", figures)
    if args.json:
        text = {"file": TEXT.name, "sha256": TEXT_SHA256, "tokens": count, "context": args.context}
        record = {"facts": machine, "versions": versions, "model": Path(args.model).name, "text": text}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record | {"figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
