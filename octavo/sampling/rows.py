"""The sampler's input and output, one entry per row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.outputs import TokenLogprobs
from octavo.sampling.features import Shaping

NOT_FINITE = -1  # instead of a token: the largest logit is infinite or no number
NOTHING_LEFT = -2  # instead of a token: what the request asks for leaves no token with a finite logit


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What to do with each of S rows of logits.

    A row with `target >= 0` samples nothing: it asks for the logprob of a token that is already known (the next token
    of the prompt).
    """

    temperature: NDArray[np.float64]  # [S]; 0 is greedy
    top_k: NDArray[np.int32]  # [S]; 0 keeps all
    top_p: NDArray[np.float64]  # [S]; 1 keeps all
    min_p: NDArray[np.float64]  # [S]; 0 keeps all
    seed: NDArray[np.uint64]  # [S]
    choice: NDArray[np.uint64]  # [S]; index among the n choices of a request
    position: NDArray[np.uint64]  # [S]; position that the sampled token will have in its sequence
    num_logprobs: NDArray[np.int32]  # [S]; the most likely tokens to report beside the chosen one; -1 reports nothing
    target: NDArray[np.int32]  # [S]; -1 samples
    shaping: Sequence[Shaping | None]  # [S]; what changes the logits first; None nothing

    def __len__(self) -> int:
        return len(self.target)

    def slice(self, start: int, stop: int) -> SamplingRows:
        return SamplingRows(*(getattr(self, name)[start:stop] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's answer."""

    token_ids: NDArray[np.int32]  # [S]; the target where there was one; or NOT_FINITE, or NOTHING_LEFT
    logprobs: list[TokenLogprobs | None]  # [S]

    @staticmethod
    def concatenate(parts: list[Sampled]) -> Sampled:
        if not parts:
            return Sampled(np.empty(0, np.int32), [])
        return Sampled(np.concatenate([p.token_ids for p in parts]), [entry for p in parts for entry in p.logprobs])
