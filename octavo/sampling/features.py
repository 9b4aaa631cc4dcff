"""What changes logits before a token is picked: one small class a feature.

A feature is made once, when a request reaches the worker, and keeps nothing between steps: what it does to a row
follows from the request's parameters and the tokens so far. So preemption, replay and batching cannot change a result.

Only + - * /, comparisons and assignment in float32 here, each rounded on its own (no fused multiply-add): every
machine, and every backend that does this in its own code, gets the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.sampling_params import Bans, SamplingParams

Row = NDArray[np.float32]  # [V], V the size of the tokeniser's vocabulary

_BANNED = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of a sequence so far; a view, not to be kept."""

    tokens: NDArray[np.int32]
    prompt_length: int

    @property
    def output(self) -> NDArray[np.int32]:
        return self.tokens[self.prompt_length :]


class Feature(ABC):
    @staticmethod
    @abstractmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether a request asks for this."""

    @abstractmethod
    def __init__(self, params: SamplingParams, bans: Bans) -> None: ...

    @abstractmethod
    def apply(self, logits: Row, history: History) -> None:
        """Changes one row in place."""


class AllowedTokenIds(Feature):
    """Bans all ids but these."""

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.ids = np.array(params.allowed_token_ids, np.intp)

    def apply(self, logits: Row, history: History) -> None:
        allowed = logits[self.ids]
        logits.fill(_BANNED)
        logits[self.ids] = allowed


class BadWords(Feature):
    """Bans the last token of a word when the output ends with the tokens before it."""

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.single = np.array([word[0] for word in bans.words if len(word) == 1], np.intp)
        self.longer: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the token before the last
        for word in bans.words:
            if len(word) > 1:
                self.longer[word[-2]].append(word)

    def apply(self, logits: Row, history: History) -> None:
        logits[self.single] = _BANNED
        output = history.output
        for word in self.longer.get(int(output[-1]), ()) if len(output) else ():
            before = word[:-1]
            if tuple(output[-len(before) :].tolist()) == before:
                logits[word[-1]] = _BANNED


class MinTokens(Feature):
    """Bans whatever would end the output before it has `min_tokens` tokens."""

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.min_tokens = params.min_tokens
        self.ends = np.array(bans.ends, np.intp)

    def apply(self, logits: Row, history: History) -> None:
        if len(history.output) < self.min_tokens:
            logits[self.ends] = _BANNED


class LogitBias(Feature):
    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.ids = np.array([token for token, _ in params.logit_bias], np.intp)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)

    def apply(self, logits: Row, history: History) -> None:
        logits[self.ids] += self.biases


class RepetitionPenalty(Feature):
    """Makes each token of prompt or output less likely, by division (Keskar et al., CTRL, 2019, section 4.1)."""

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.penalty = np.float32(params.repetition_penalty)

    def apply(self, logits: Row, history: History) -> None:
        seen = history.tokens[history.tokens < len(logits)]  # a prompt may hold ids that the tokeniser does not know
        old = logits[seen]
        logits[seen] = np.where(old > 0, old / self.penalty, old * self.penalty)  # of a repeated id: the same each time


class FrequencyPenalty(Feature):
    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.penalty = np.float32(params.frequency_penalty)

    def apply(self, logits: Row, history: History) -> None:
        ids, counts = np.unique(history.output, return_counts=True)
        logits[ids] -= self.penalty * counts.astype(np.float32)


class PresencePenalty(Feature):
    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.presence_penalty != 0.0

    def __init__(self, params: SamplingParams, bans: Bans) -> None:
        self.penalty = np.float32(params.presence_penalty)

    def apply(self, logits: Row, history: History) -> None:
        seen = history.output
        logits[seen] = logits[seen] - self.penalty  # of a repeated id: the same each time


IN_ORDER: tuple[type[Feature], ...] = (
    AllowedTokenIds,
    BadWords,
    MinTokens,
    LogitBias,
    RepetitionPenalty,
    FrequencyPenalty,
    PresencePenalty,
)


def features_of(params: SamplingParams, bans: Bans) -> tuple[Feature, ...]:
    """What a request asks for, in the order in which it is applied; for most requests nothing."""
    return tuple(feature(params, bans) for feature in IN_ORDER if feature.wanted(params))


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is done to one row before a token is picked."""

    features: tuple[Feature, ...]
    history: History

    def __call__(self, logits: Row) -> Row:
        """A changed copy."""
        shaped = logits.copy()
        with np.errstate(over="ignore"):  # a penalty of an extreme logit may pass float32's range: it is infinite then
            for feature in self.features:
                feature.apply(shaped, self.history)
        return shaped
