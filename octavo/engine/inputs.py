"""From a prompt to a checked sequence of token ids. Everything that can be wrong with a request is found here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

from octavo.config import ModelConfig
from octavo.engine.messages import SequenceRequest
from octavo.errors import RequestError
from octavo.sampling import request_seed
from octavo.sampling_params import SamplingParams
from octavo.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


class InputProcessor:
    """Tokenises and validates; numbers the requests and gives a seed to those that bring none."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, max_model_len: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.max_model_len = max_model_len
        self.seed = seed
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._next_id = 0

    def process(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> SequenceRequest:
        """
        Raises:
            RequestError: the prompt is empty, of the wrong type, names ids that the model lacks, or leaves no room in
                the context for one token; or a parameter names such an id.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r}: expected SamplingParams")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority={priority!r}: expected a whole number")
        tokens = self._tokens(prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if len(tokens) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.max_model_len}, and at least one must "
                "be left to generate: shorten the prompt"
            )
        seq_id = self._next_id
        self._next_id += 1
        room = self.max_model_len if params.max_tokens is None else len(tokens) + params.max_tokens
        return SequenceRequest(
            seq_id=seq_id,
            tokens=tokens,
            params=params,
            seed=request_seed(self.seed, seq_id) if params.seed is None else params.seed,
            max_length=min(room, self.max_model_len),
            stop_token_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.eos_token_ids),
            priority=priority,
            arrival_time=time.monotonic(),
        )

    def _tokens(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            ids = prompt["prompt_token_ids"]
            if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
                raise RequestError(f"prompt_token_ids={ids!r}: expected a list of token ids")
            tokens = list(ids)
            self._check_ids("prompt_token_ids", tokens)
        else:
            shown = repr(prompt)
            raise RequestError(
                f"prompt {shown[:80]}{'...' if len(shown) > 80 else ''}: expected text or {{'prompt_token_ids': [...]}}"
            )
        if not tokens:
            raise RequestError(
                "the prompt is empty and the tokeniser adds no token of its own: give at least one token"
            )
        return tokens

    def _check_ids(self, name: str, ids: Sequence[object]) -> None:
        size = self.model.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(f"{name}: {token!r} is not a token id; the model's are 0 to {size - 1}")
