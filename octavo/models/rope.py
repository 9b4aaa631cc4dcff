"""Inverse frequencies of rotary position embeddings (RoPE), plain and scaled to longer contexts."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from octavo.config import RopeConfig
from octavo.models.exact import log, power

Float32 = NDArray[np.float32]


def inverse_frequencies(rope: RopeConfig) -> tuple[Float32, float]:
    """Radians per position of each pair of columns, and the factor on cos and sin.

    Sources: RoPE (arXiv:2104.09864), linear (arXiv:2306.15595), YaRN (arXiv:2309.00071), llama3 (Llama 3.1's code).
    The float32 steps are those of transformers, except that powers and logarithms are correctly rounded (torch's are
    sometimes one unit off in the last place).

    Returns:
        float32 [rope.dim / 2], and 1.0 for every kind but yarn.
    """
    periods = np.array(_periods(rope.theta, rope.dim), np.float32)
    plain: Float32 = np.float32(1) / periods
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return np.divide(plain, np.float32(rope.factor)), 1.0
        case "factors":
            return np.divide(plain, np.asarray(rope.freq_factors, np.float32)), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, periods), _yarn_attention_factor(rope)


@cache
def _periods(theta: float, dim: int) -> tuple[float, ...]:
    """theta ** (i / dim) for i = 0, 2, ..., the exponent rounded to float32, the power to float64."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return tuple(power(theta, exponent) for exponent in exponents.tolist())


def _llama3(rope: RopeConfig, plain: Float32) -> Float32:
    """Short waves stay, long waves are stretched by `factor`, those between blend from one to the other."""
    assert rope.original_max_position is not None
    wavelength = np.float32(2 * math.pi) * (np.float32(1) / plain)  # torch divides a number by a tensor like this
    stretched = plain / np.float32(rope.factor)
    width = rope.high_freq_factor - rope.low_freq_factor
    turns = rope.original_max_position * (np.float32(1) / wavelength)
    blend = (turns - np.float32(rope.low_freq_factor)) / np.float32(width)
    blended = (1 - blend) * plain / np.float32(rope.factor) + blend * plain
    long = wavelength > rope.original_max_position / rope.low_freq_factor
    short = wavelength < rope.original_max_position / rope.high_freq_factor
    return np.where(short, plain, np.where(long, stretched, blended)).astype(np.float32)


def _yarn(rope: RopeConfig, plain: Float32, periods: Float32) -> Float32:
    """Columns that turn more than beta_fast times in the original context stay, below beta_slow they are stretched."""
    low, high = _yarn_correction_range(rope)
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    stretched = np.float32(1) / (np.float32(rope.factor) * periods)
    scaled: Float32 = stretched * (1 - keep) + plain * keep
    return scaled


def _yarn_correction_range(rope: RopeConfig) -> tuple[float, float]:
    """The columns (as real numbers) that turn beta_fast and beta_slow times within the original context."""
    assert rope.original_max_position is not None
    context = rope.original_max_position / (2 * math.pi)
    low, high = (rope.dim * log(context / turns) / (2 * log(rope.theta)) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high if high != low else high + 0.001  # a step rather than 0 / 0


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0
