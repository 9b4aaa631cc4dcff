"""From logits to tokens and logprobs, in numpy: exact, batched, and independent of what else is in the batch."""

from octavo.sampling.random import request_seed
from octavo.sampling.rows import Sampled, SamplingRows
from octavo.sampling.sampler import Sampler

__all__ = ["Sampled", "Sampler", "SamplingRows", "request_seed"]
