"""Logits of every family equal transformers', however a sequence is cut into chunks and wherever its blocks lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.torch import step as step_module
from tests.backends.checkpoints import CHECKPOINTS, WINDOW, Reference, prompt
from tests.backends.paged import Paged, assert_close, graph, load

References = Callable[[str], Reference]
LENGTH = 100  # three times the original context of the scaled RoPEs, eight windows


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, None])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_any_chunk_size(reference: References, name: str, chunk: int | None) -> None:
    tokens = prompt(LENGTH)
    assert_close(Paged(load(reference(name).path)).logits(tokens, chunk), reference(name).logits(tokens))


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_windows_are_crossed_exactly(reference: References, name: str, chunk: int | None, length: int) -> None:
    tokens = prompt(length, seed=length)
    assert_close(Paged(load(reference(name).path)).logits(tokens, chunk), reference(name).logits(tokens))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_any_block_size(reference: References, block_size: int) -> None:
    tokens = prompt(50)
    paged = Paged(load(reference("gemma3").path, block_size=block_size), block_size=block_size)
    assert_close(paged.logits(tokens, 9), reference("gemma3").logits(tokens))


@pytest.mark.parametrize("small", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_sequences_share_steps(reference: References, name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven sequences start at different steps, in chunks of different sizes, and decode beside each other's chunks."""
    if small:  # so small that every batch of single rows and every chunk is cut
        monkeypatch.setattr(step_module, "GATHER_BYTES", 8000)
        monkeypatch.setattr(step_module, "SCORE_BYTES", 3000)
        monkeypatch.setattr(step_module, "QUERY_ROWS", 5)
    paged = Paged(load(reference(name).path))
    sequences = {f"s{i}": prompt(20 + 9 * i, seed=i) for i in range(7)}
    chunk = {f"s{i}": (1, 30, 4, 17, 2, 11, 64)[i] for i in range(7)}
    found: dict[str, list[np.ndarray]] = {key: [] for key in sequences}
    for now in range(200):
        work = {}
        for i, (key, tokens) in enumerate(sequences.items()):
            done = sum(map(len, found[key]))
            size = chunk[key] if done < 15 else 1
            if now >= 3 * i and done < len(tokens):
                work[key] = tokens[done : done + size]
        if not work:
            break
        for key, logits in paged.step(work).items():
            found[key].append(logits)
    for key, tokens in sequences.items():
        assert_close(np.concatenate(found[key]), reference(name).logits(tokens))


@pytest.mark.parametrize("name", ["llama", "llama-biases", "mistral-window", "gemma3"])
def test_bfloat16_is_closer_to_the_truth_than_transformers(reference: References, name: str, tmp_path: Path) -> None:
    """The truth: the same bfloat16 weights in float32.

    octavo rounds each edge once; transformers rounds there, and inside norms, RoPE and softmax too. So its own error
    bounds ours. Independently of it: each of E bfloat16 edges adds an error of at most u = 2^-9 of its values, of mean
    square u² / 3; they are independent, and norms keep gains near one. We allow a gain of 4.
    """
    tokens = prompt(60)
    model = reference(name).model
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    found = Paged(load(tmp_path, dtype="bfloat16")).logits(tokens, 23)
    with torch.inference_mode():
        theirs, truth = (
            type(model).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")(torch.tensor([tokens]))
            for dtype in (torch.bfloat16, torch.float32)
        )
    expected = truth.logits[0].double().numpy()
    error, their_error = (rms(x - expected) for x in (found, theirs.logits[0].double().numpy()))
    edges = sum(node.output.dtype == "bfloat16" for node in graph(tmp_path, "bfloat16").nodes)
    assert error <= 1.05 * their_error
    assert error <= 4 * 2**-9 * (edges / 3) ** 0.5 * rms(expected)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
