"""What a request asks of the sampler, checked when it is written down."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError

MAX_LOGPROBS = 20  # as OpenAI's top_logprobs; a request for more is refused
GREEDY_TEMPERATURE = 1e-3  # at or below this a temperature is greedy: nothing else is left of the distribution
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1  # what the sampler's int32 holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Names and meanings follow vLLM.

    Attributes:
        temperature: divides the logits; 0 (and anything up to 0.001) picks the most likely token, ties to the lower id.
        top_k: sample among the k most likely tokens; 0 or -1 means all.
        top_p: sample among the fewest most likely tokens whose probabilities sum to at least top_p, after top_k.
        seed: makes the request repeatable whatever else runs; None draws one from the engine's seed.
        max_tokens: most tokens to generate; None means up to the end of the context.
        stop_token_ids: the request ends when it samples one of these; the token is kept in `token_ids`.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: report the logprob of each sampled token and of this many most likely ones (0 to 20).
        prompt_logprobs: likewise for each token of the prompt.
        skip_special_tokens: leave control tokens out of the text.

    Raises:
        RequestError: a value is of the wrong type or out of its range; the message names both.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p=0: must be above 0 and at most 1")
        _integer("top_k", self.top_k, -1, MAX_TOP_K)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: expected true or false")
        stop_token_ids: Any = self.stop_token_ids
        if not isinstance(stop_token_ids, Iterable) or isinstance(stop_token_ids, (str, bytes)):
            raise RequestError(f"stop_token_ids={stop_token_ids!r}: expected a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE


def _number(name: str, value: Any, low: float, high: float | None) -> None:
    limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}={value!r}: expected a number {limits}")
    if not low <= value <= (sys.float_info.max if high is None else high):  # false for a NaN
        raise RequestError(f"{name}={value!r}: must be a finite number {limits}")


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    limits = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r}: expected a whole number {limits}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}={value}: must be {limits}")
