"""From logits to tokens and logprobs, in numpy: exact, batched, and independent of what else is in the batch."""

from octavo.sampling.features import Feature, History, Shaping, features_of
from octavo.sampling.random import request_seed
from octavo.sampling.rows import NOT_FINITE, NOTHING_LEFT, Sampled, SamplingRows
from octavo.sampling.sampler import Sampler

__all__ = [
    "NOTHING_LEFT",
    "NOT_FINITE",
    "Feature",
    "History",
    "Sampled",
    "Sampler",
    "SamplingRows",
    "Shaping",
    "features_of",
    "request_seed",
]
