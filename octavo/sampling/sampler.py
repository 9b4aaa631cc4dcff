"""The sampler."""

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.rows import Sampled, SamplingRows


class Sampler:
    """Samples rows of logits; `vocab_size` is the tokeniser's, so that padding ids past it are never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, logits: NDArray[np.float32], rows: SamplingRows) -> Sampled:
        raise AssertionError("to be written next")
