"""octavo: a paged LLM inference and serving engine."""

from octavo.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["SamplingParams"]
