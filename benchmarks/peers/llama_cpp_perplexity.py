"""llama.cpp's log-probabilities of given tokens; `benchmarks/perplexity.py` runs this in llama.cpp's environment.

    stdin:  {"windows": [[ids], ...]}
    stdout: {"versions": {...}, "logprobs": [[...], ...], "argmax": [[...], ...]}

Of each window every token but its first: the natural logarithm of its probability after the tokens before it, in
float64 from llama.cpp's float32 logits, and the most likely token at its place. Nothing is kept from one window to the
next. Weights as the file has them, keys and values in float16 (llama.cpp's default).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from importlib.metadata import version
from typing import Any

import llama_cpp as llama
import numpy as np


class Scorer:
    def __init__(self, model: str, threads: int, context: int) -> None:
        self.log = llama.llama_log_callback(lambda level, text, data: None)  # silent; kept alive with this object
        llama.llama_log_set(self.log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, params)
        self.batch = llama.llama_batch_init(context, 0, 1)

    def score(self, window: list[int]) -> tuple[list[float], list[int]]:
        """Log-probability of, and most likely token at, each place but the first."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        batch = self.batch
        batch.n_tokens = len(window)
        for row, token in enumerate(window):
            batch.token[row], batch.pos[row] = token, row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row < len(window) - 1
        status = llama.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status} for {len(window)} tokens")
        logprobs, argmax = [], []
        for row, token in enumerate(window[1:]):
            address = llama.llama_get_logits_ith(self.context, row)
            logits = np.ctypeslib.as_array(address, shape=(self.vocab_size,)).astype(np.float64)
            top = logits.max()
            logprobs.append(float(logits[token] - top - np.log(np.exp(logits - top).sum())))
            argmax.append(int(logits.argmax()))
        return logprobs, argmax


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    windows: list[list[int]] = json.load(sys.stdin)["windows"]
    scorer = Scorer(args.model, args.threads, max(map(len, windows)))
    answer: dict[str, Any] = {"versions": {"llama-cpp-python": version("llama-cpp-python")}}
    answer["logprobs"], answer["argmax"] = [], []
    for window in windows:
        logprobs, argmax = scorer.score(window)
        answer["logprobs"].append(logprobs)
        answer["argmax"].append(argmax)
    json.dump(answer, answers)
    answers.flush()


if __name__ == "__main__":
    main()
