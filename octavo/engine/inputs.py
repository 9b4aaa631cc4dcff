"""From a prompt to a checked sequence of token ids. Everything that can be wrong with a request is found here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NotRequired, TypedDict

from octavo.config import ModelConfig
from octavo.engine.messages import BeamRequest, Request, SequenceRequest
from octavo.errors import RequestError
from octavo.sampling import request_seed
from octavo.sampling_params import Bans, BeamSearchParams, SamplingParams, is_text
from octavo.tokenizer import Tokenizer

MAX_SALT_LENGTH = 1024  # characters
MAX_PRIORITY = 2**63 - 1  # what a message between processes holds


class TextPrompt(TypedDict):
    """A prompt as text; only requests of the same `cache_salt` share what is computed."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already; `cache_salt` as above."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str | None]


Prompt = str | TextPrompt | TokensPrompt


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt that was given as text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


class InputProcessor:
    """Tokenises and validates; numbers the requests and gives a seed to those that bring none."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, max_model_len: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.max_model_len = max_model_len
        self.seed = seed
        self.vocab_size = min(tokenizer.vocab_size, model.vocab_size)  # ids that can be sampled, and have a logprob
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._num_requests = 0
        self._num_sequences = 0

    @cached_property
    def max_characters(self) -> int:
        """No longer text fits into the context: each token stands for so many characters at most."""
        return self.max_model_len * self.tokenizer.longest_token

    def check_text(self, text: str) -> None:
        """
        Raises:
            RequestError: the text is so long that it need not be tokenised, which would take long.
        """
        if len(text) > self.max_model_len and len(text) > self.max_characters:
            raise RequestError(
                f"the prompt has {len(text)} characters; the context holds {self.max_model_len} tokens, of "
                f"{self.tokenizer.longest_token} characters at most: shorten the prompt"
            )

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        *,
        tokens: list[int] | None = None,
        bans: Bans | None = None,
    ) -> Request:
        """
        Args:
            tokens: what `tokens` made of the prompt, if it did.
            bans: what `bans` made of the parameters, likewise.

        Raises:
            RequestError: the prompt or its salt is empty or of the wrong type; the prompt names ids that the model
                lacks, or leaves no room in the context for one token; a parameter names such an id, or parameters leave
                no token to sample.
        """
        bans = self.bans(params) if bans is None else bans
        _check_priority(priority)
        tokens, salt = self.tokens(prompt) if tokens is None else tokens, _cache_salt(prompt)
        if params.prompt_logprobs is not None:
            _check_ids("prompt_token_ids with prompt_logprobs", tokens, self.vocab_size)
        self._check_length(len(tokens), scores=params.max_tokens == 0)
        room = self.max_model_len if params.max_tokens is None else len(tokens) + params.max_tokens
        first = SequenceRequest(
            seq_id=self._num_sequences,
            tokens=tokens,
            params=params if params.num_choices == params.n else _ranked(params),
            seed=request_seed(self.seed, self._num_requests) if params.seed is None else params.seed,
            # To score a prompt is to compute it for a token that is then dropped, even past the end of the context.
            max_length=len(tokens) + 1 if params.max_tokens == 0 else min(room, self.max_model_len),
            stop_token_ids=self._stop_token_ids(params),
            priority=priority,
            arrival_time=time.monotonic(),
            bans=bans,
            cache_salt=salt,
        )
        self._num_requests += 1
        self._num_sequences += params.num_choices
        return Request(params, [first, *_further_choices(first, params.num_choices)])

    def process_beams(self, prompt: Prompt, params: BeamSearchParams, priority: int = 0) -> BeamRequest:
        """
        Raises:
            RequestError: as for `process`.
        """
        _check_priority(priority)
        tokens, salt = self.tokens(prompt), _cache_salt(prompt)
        _check_ids("stop_token_ids", params.stop_token_ids, self.model.vocab_size)
        self._check_length(len(tokens), scores=False)
        room = self.max_model_len if params.max_tokens is None else len(tokens) + params.max_tokens
        request = BeamRequest(
            seq_id=self._num_sequences,
            tokens=tokens,
            params=params,
            max_length=min(room, self.max_model_len),
            stop_token_ids=self._stop_token_ids(params),
            priority=priority,
            arrival_time=time.monotonic(),
            cache_salt=salt,
        )
        self._num_requests += 1
        self._num_sequences += request.num_seq_ids
        return request

    def _stop_token_ids(self, params: SamplingParams | BeamSearchParams) -> frozenset[int]:
        if params.max_tokens == 0:
            return frozenset()
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)

    def _check_length(self, count: int, *, scores: bool) -> None:
        if scores and count > self.max_model_len:
            raise RequestError(
                f"the prompt has {count} tokens; the context holds {self.max_model_len}: shorten the prompt"
            )
        if not scores and count >= self.max_model_len:
            raise RequestError(
                f"the prompt has {count} tokens; the context holds {self.max_model_len}, and at least one must be left "
                "to generate: shorten the prompt, or score it with max_tokens=0"
            )

    def bans(self, params: SamplingParams) -> Bans:
        """What the parameters forbid; may be called in any thread.

        Raises:
            RequestError: a parameter names an id that the model lacks, or they leave no token to sample.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r}: expected SamplingParams")
        _check_ids("stop_token_ids", params.stop_token_ids, self.model.vocab_size)
        _check_ids("logit_bias", (token for token, _ in params.logit_bias), self.vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), self.vocab_size)
        words = dict.fromkeys(form for word in params.bad_words for form in self._forms(word))
        ends = self.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else ()
        bans = Bans(tuple(words), tuple(sorted(token for token in ends if token < self.vocab_size)))
        banned = {word[0] for word in bans.words if len(word) == 1}.union(bans.ends)
        if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
            raise RequestError(
                f"allowed_token_ids: bad_words, and ends that min_tokens={params.min_tokens} puts off, forbid all "
                f"{len(params.allowed_token_ids)} of them; allow at least one more"
            )
        return bans

    def _forms(self, word: str) -> list[tuple[int, ...]]:
        """A bad word's token ids at the start of a text or inside a word, and after a space."""
        bare = word.lstrip(" ") or word
        forms = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)]
        if () in forms:
            raise RequestError(f"bad_words={word!r}: the tokeniser makes no token of it; leave it out")
        return [form for form in forms if max(form) < self.vocab_size]

    def tokens(self, prompt: object) -> list[int]:
        """The prompt's token ids; may be called in any thread.

        Raises:
            RequestError: the prompt is empty, of the wrong type, far too long, or names ids that the model lacks.
        """
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        names = set(given) - {"cache_salt"} if isinstance(given, Mapping) else set()
        if isinstance(given, Mapping) and names == {"prompt"} and isinstance(given["prompt"], str):
            self.check_text(given["prompt"])
            tokens = self.tokenizer.encode(given["prompt"])
            if self.tokenizer.vocab_size > self.model.vocab_size:
                _check_ids("the prompt's tokens", tokens, self.model.vocab_size)
        elif isinstance(given, Mapping) and names == {"prompt_token_ids"}:
            ids = given["prompt_token_ids"]
            if hasattr(ids, "tolist"):  # of an array: plain numbers
                ids = ids.tolist()
            if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
                raise RequestError(f"prompt_token_ids={ids!r}: expected a list of token ids")
            tokens = list(ids)
            _check_ids("prompt_token_ids", tokens, self.model.vocab_size)
        else:
            shown = repr(prompt)
            raise RequestError(
                f"prompt {shown[:80]}{'...' if len(shown) > 80 else ''}: expected text, {{'prompt': text}} or "
                "{'prompt_token_ids': [...]}, the latter two perhaps with a 'cache_salt'"
            )
        if not tokens:
            raise RequestError(
                "the prompt is empty and the tokeniser adds no token of its own: give at least one token"
            )
        return tokens


def _check_priority(priority: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority={priority!r}: expected a whole number")
    if abs(priority) > MAX_PRIORITY:
        raise RequestError(f"priority: must be at least -{MAX_PRIORITY} and at most {MAX_PRIORITY}")


def _cache_salt(prompt: object) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_LENGTH):
        shown = repr(salt)
        raise RequestError(
            f"cache_salt={shown[:60]}{'...' if len(shown) > 60 else ''}: expected text of 1 to {MAX_SALT_LENGTH} "
            "characters, or None"
        )
    if salt is not None and not is_text(salt):
        raise RequestError("cache_salt: it holds a lone surrogate, which no text does; leave it out")
    return salt


def _ranked(params: SamplingParams) -> SamplingParams:
    """So that the sampler reports what the best choices are found by."""
    return replace(params, logprobs=params.logprobs or 0)


def _further_choices(first: SequenceRequest, num_choices: int) -> Iterator[SequenceRequest]:
    """The request's other sequences; the prompt's logprobs are computed once, by the first."""
    params = replace(first.params, prompt_logprobs=None)
    for choice in range(1, num_choices):
        yield replace(first, seq_id=first.seq_id + choice, choice=choice, params=params)


def _check_ids(name: str, ids: Iterable[object], size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise RequestError(f"{name}: {token!r} is not a token id; the model's are 0 to {size - 1}")
