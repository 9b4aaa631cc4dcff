"""Requests of random tokens, and running them to their end: what `octavo bench` and `octavo profile` measure."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.engine import LLMEngine, TokensPrompt
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams


def random_prompt(engine: LLMEngine, length: int, rng: random.Random) -> TokensPrompt:
    """Any ids of the vocabulary: what they are makes no difference to the time."""
    size = min(engine.tokenizer.vocab_size, engine.model_config.vocab_size)
    return {"prompt_token_ids": rng.choices(range(size), k=length)}


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly as many tokens, each the most likely one."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def run_to_end(engine: LLMEngine, on_step: Callable[[list[RequestOutput]], None] = lambda outputs: None) -> float:
    """Steps until nothing is left, showing each step what it moved; returns the seconds that took.

    Raises:
        OctavoError: a request failed.
    """
    start = time.perf_counter()
    while engine.has_unfinished_requests:
        outputs = engine.step()
        on_step(outputs)
        for output in outputs:
            if output.error is not None:
                raise OctavoError(f"request {output.request_id} failed: {output.error}")
    return time.perf_counter() - start


def positive(text: str) -> int:
    """For argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def length_range(text: str) -> tuple[int, int]:
    """For argparse: "128" or "64:256", both ends included."""
    low, colon, high = text.partition(":")
    try:
        least, most = positive(low), positive(high if colon else low)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor MIN:MAX, as in 64:256") from error
    if least > most:
        raise argparse.ArgumentTypeError(f"{text!r}: {least} is more than {most}")
    return least, most


def write_json(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OctavoError(f"cannot write {path}: {error.strerror}") from error
