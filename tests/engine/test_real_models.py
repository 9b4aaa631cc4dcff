"""Both real models against transformers, on the same dequantised weights in float32.

transformers reads our 64 tokens behind each prompt in one pass. A token is right when it is transformers' most likely
one given everything before it; when that holds at each step, the greedy continuations are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.reference import gguf_reference

PROMPTS = [
    "The capital of France is",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at",
    "¿Cuál es la capital de España?",
    "Der schnelle braune Fuchs",
    "机器学习是",
    "🌍🚀 Emoji are",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM users WHERE",
    "Q: What is 17 + 25?\nA:",
    '{"name": "Ada", "born": 1815, "field":',
    "<html>\n  <body>\n    <h1>",
    "The mitochondria is the",
    "   leading spaces, and   repeated   ones",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be, that is",
    "A",
    "In 1969, Neil Armstrong became the first person to walk on the Moon. " * 6 + "He",
]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_greedy_continuations_and_logprobs_equal_transformers(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model).path
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    with LLM(str(path), max_model_len=512, num_kv_blocks=1024, backend="torch", dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, params)
    reference = gguf_reference(path)
    worst, close_calls = 0.0, 0
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0].double()
        best, second = logits.topk(2).values.unbind(-1)
        logprobs = logits.log_softmax(-1)
        assert len(completion.token_ids) == 64
        for i, token in enumerate(completion.token_ids):
            row = len(prompt) - 1 + i
            if logits[row, token] != best[row]:
                assert best[row] - second[row] < 1e-3, f"{output.prompt!r}: token {i} differs with a clear winner"
                close_calls += 1
            for candidate, entry in completion.logprobs[i].items():
                worst = max(worst, abs(entry.logprob - float(logprobs[row, candidate])))
        for row, entries in enumerate(output.prompt_logprobs[1:]):
            token = prompt[row + 1]
            worst = max(worst, abs(entries[token].logprob - float(logprobs[row, token])))
    print(f"{path.name}: largest logprob difference {worst:.2e}, {close_calls} ties broken the other way")
    assert worst < 1e-3
