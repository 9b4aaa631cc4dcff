"""Inverse frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.config import RopeConfig
from octavo.models import inverse_frequencies, model_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3 8": {**LLAMA3, "factor": 8.0},
    "llama3 32": {**LLAMA3, "factor": 32.0},
    "llama3 narrow band": {**LLAMA3, "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention factor": {**YARN, "attention_factor": 0.75},
    "yarn mscale": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.8},
    "yarn one mscale": {**YARN, "mscale": 1.5},
    "yarn exact range": {**YARN, "truncate": False},
    "yarn step": {**YARN, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False},
    "yarn 40": {**YARN, "factor": 40.0},
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(case: str, head_dim: int, theta: float) -> None:
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={**CASES[case], "rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, expected_factor = ROPE_INIT_FUNCTIONS.get(CASES[case]["rope_type"], plain)(config)
    rope = model_config(config.to_dict(), {}).layers[0].rope
    frequencies, factor = inverse_frequencies(rope)
    assert frequencies.dtype == np.float32
    assert factor == pytest.approx(expected_factor, rel=1e-15)
    # torch's float32 pow is off by a unit in the last place here and there, ours never. Where they agree, so do all
    # bits of the result; where not, blending divides by the width of the band and may cancel down to 1 / factor.
    theirs, ours = plain(config)[0].numpy(), inverse_frequencies(RopeConfig(head_dim, theta))[0]
    agree = theirs == ours
    assert agree.mean() > 0.8
    np.testing.assert_array_equal(frequencies[agree], expected.numpy()[agree])
    assert np.abs(frequencies - expected.numpy()).max() <= 2**-20 * np.abs(ours).max()


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_powers_are_correctly_rounded(theta: float) -> None:
    frequencies, _ = inverse_frequencies(RopeConfig(128, theta))
    exponents = np.arange(0, 128, 2) / 128  # exact in float32 too
    periods = (np.longdouble(theta) ** exponents.astype(np.longdouble)).astype(np.float32)
    np.testing.assert_array_equal(frequencies, np.float32(1) / periods)


def test_factors_divide_each_frequency() -> None:
    plain, _ = inverse_frequencies(RopeConfig(8, 10_000.0))
    divided, factor = inverse_frequencies(RopeConfig(8, 10_000.0, "factors", freq_factors=(1.0, 2.0, 4.0, 8.0)))
    np.testing.assert_array_equal(divided * np.array([1, 2, 4, 8]), plain)
    assert factor == 1.0


def test_factors_of_a_gguf_are_llama3_scaling() -> None:
    """llama.cpp's converter stores plain / llama3 as divisors; both ways of writing it must agree."""
    scaled = RopeConfig(64, 500_000.0, "llama3", factor=32.0, original_max_position=8192)
    expected, _ = inverse_frequencies(scaled)
    plain, _ = inverse_frequencies(RopeConfig(64, 500_000.0))
    divisors = tuple((plain / expected).tolist())
    found, _ = inverse_frequencies(RopeConfig(64, 500_000.0, "factors", freq_factors=divisors))
    np.testing.assert_allclose(found, expected, rtol=2**-22)
