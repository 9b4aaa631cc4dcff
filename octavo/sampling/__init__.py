"""From logits to tokens and logprobs, in numpy: exact, batched, and independent of what else is in the batch."""

from octavo.sampling.rows import Sampled, SamplingRows
from octavo.sampling.sampler import Sampler

__all__ = ["Sampled", "Sampler", "SamplingRows"]
