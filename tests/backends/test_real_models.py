"""Logits of the real models equal transformers' on the same GGUF file, dequantised to float32."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedConfig

from octavo.weights import open_checkpoint
from tests.backends.paged import Paged, assert_close, load
from tests.reference import gguf_reference

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Hello world! Café déjà vu — 123 😊",
]


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_logits_equal_transformers(fixture: str, request: pytest.FixtureRequest) -> None:
    """Also past Gemma 3's window of 512, in chunks that straddle it."""
    path = open_checkpoint(request.getfixturevalue(fixture)).path
    model = gguf_reference(path)
    if fixture == "gemma3_path":
        as_google_configured_it(model.config)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    prompts.append((tokenizer("In 1969, Neil Armstrong walked on the Moon. ").input_ids * 60)[:600])
    paged = Paged(load(path, block_size=16), num_blocks=128, block_size=16)
    for i, tokens in enumerate(prompts):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        assert_close(paged.logits(tokens, 250, name=str(i)), expected)


def as_google_configured_it(config: PreTrainedConfig) -> None:
    """What transformers does not find in Gemma's GGUF it fills in; it must be what google/gemma-3-270m says."""
    assert config.sliding_window == 512
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert config.query_pre_attn_scalar == 256
