"""What a request asks of the sampler, checked when it is written down."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import RequestError

GREEDY_TEMPERATURE = 1e-3  # at or below this a temperature is greedy: nothing else is left of the distribution
MAX_LOGPROBS = 20  # as OpenAI's top_logprobs; a request for more is refused
MAX_INTEGER = 2**64 - 1  # what a message between processes holds
MAX_SEED = MAX_INTEGER
MAX_TOP_K = 2**31 - 1  # what the sampler's int32 holds
MAX_CHOICES = 128  # of n and best_of
MAX_BEAM_WIDTH = 128
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**20  # more than any vocabulary has
MAX_WORD_LENGTH = 1024  # characters of a stop string or a bad word
MAX_SHOWN = 60  # characters of a refused value that a message repeats

_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, sys.float_info.max),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "top_k": (-1, MAX_TOP_K),
    "seed": (0, MAX_SEED),
    "max_tokens": (0, None),
    "min_tokens": (0, None),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_OPTIONAL = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Names and meanings follow vLLM; docs/sampling.md says what each does, exactly.

    The types below are what is stored, so that parameters can be compared, hashed and sent. Any list is taken, one
    string for `stop`, a mapping from ids to numbers for `logit_bias`, and None for an empty one of them.

    Attributes:
        n: how many continuations to return, at most 128; a greedy request gets n equal ones.
        best_of: how many to compute; the n of the highest mean logprob per token are returned. None means n.
        temperature: divides the logits; 0 (and anything up to 0.001) picks the most likely token, ties to the lower id.
        top_k: sample among the k most likely tokens; 0 or -1 means all.
        top_p: sample among the fewest most likely tokens whose probabilities sum to at least top_p, after top_k.
        min_p: drop tokens less likely than this share of the most likely one; 0 drops none.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: taken from the logit of each token in the output.
        frequency_penalty: likewise, once for each time that the token is there.
        logit_bias: added to the logits of these ids, -100 to 100 each.
        allowed_token_ids: sample none but these; None allows all.
        bad_words: texts that the output shall not hold, as a word or after a space; at most 1024.
        seed: makes the request repeatable whatever else runs; None draws one from the engine's seed.
        max_tokens: most tokens to generate; None means up to the end of the context. 0 scores the prompt: it is
            computed, for its `prompt_logprobs`, and nothing is generated; such a prompt may fill the whole context.
        min_tokens: no end-of-sequence token, stop token or stop string before that many tokens.
        stop: the request ends when its text holds one of these, at most 16; the text is cut before it.
        include_stop_str_in_output: keep the text of what stopped the request, a stop string or a stop token.
        stop_token_ids: the request ends when it samples one of these, at most 1024; the token is kept in `token_ids`.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: report the logprob of each sampled token and of this many most likely ones (0 to 20).
        prompt_logprobs: likewise for each token of the prompt.
        skip_special_tokens: leave control tokens out of the text.

    Raises:
        RequestError: a value is of the wrong type or out of its range, or two contradict each other; the message names
            field, value and limit.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            _number(name, getattr(self, name), low, high)
            self._store(name, float(getattr(self, name)))
        if self.top_p == 0.0:
            raise RequestError("top_p=0: must be above 0 and at most 1")
        for name, (first, last) in _INTEGERS.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _integer(name, getattr(self, name), first, last)
        for name in _SWITCHES:
            _switch(name, getattr(self, name))
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
            if getattr(self, name) is None:
                self._store(name, ())
        self._store("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._store("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        self._store("logit_bias", _biases(self.logit_bias))
        stop: Any = self.stop
        self._store("stop", _words("stop", (stop,) if isinstance(stop, str) else stop, MAX_STOP_STRINGS))
        self._store("bad_words", _words("bad_words", self.bad_words, MAX_BAD_WORDS))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of={self.best_of}: must be at least n, which is {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens}: must be at most max_tokens, which is {self.max_tokens}")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise RequestError("allowed_token_ids=(): nothing could be sampled; name at least one id, or give None")

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @staticmethod
    def reporting(num_logprobs: int) -> SamplingParams:
        """Greedy, with that many most likely tokens reported, be they more than a caller may ask for."""
        params = SamplingParams(temperature=0.0, max_tokens=None)
        params._store("logprobs", num_logprobs)
        return params

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def num_choices(self) -> int:
        """How many continuations are computed."""
        return self.n if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search for the most likely continuations of one prompt; docs/beam-search.md says how it goes, exactly.

    Names and meanings follow transformers (and vLLM where it has them). There is nothing random in it.

    Attributes:
        beam_width: how many beams are kept alive, and how many are returned, at most 128.
        max_tokens: most tokens to generate; None means up to the end of the context.
        length_penalty: a beam's score is its cumulative logprob divided by (number of generated tokens) **
            length_penalty, -10 to 10: above 0 longer ones do better, 0 leaves the logprob as it is.
        early_stopping: when to stop once `beam_width` beams are finished. True: at once. False: when the best live
            beam, at its present length, scores no better than the worst finished one. "never": when no live beam can
            do better at any length.
        ignore_eos: go on past the model's end-of-sequence tokens.
        stop_token_ids: these end a beam too; the token is kept in `token_ids`.
        include_stop_str_in_output: keep the text of the token that ended a beam.
        skip_special_tokens: leave control tokens out of the text.

    Raises:
        RequestError: a value is of the wrong type or out of its range; the message names field, value and limit.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(f"early_stopping={_show(self.early_stopping)}: expected true, false or 'never'")
        for name in _SWITCHES:
            _switch(name, getattr(self, name))
        ids = () if self.stop_token_ids is None else _ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)


@dataclass(frozen=True, slots=True)
class Bans:
    """What a request forbids, in token ids: found by the front-end, which has the tokeniser, for the sampler.

    All ids are below the size of the vocabulary that is sampled from.
    """

    words: tuple[tuple[int, ...], ...] = ()  # `bad_words`: none of these may be completed
    ends: tuple[int, ...] = ()  # not before `min_tokens`: end-of-sequence tokens and `stop_token_ids`


NO_BANS = Bans()


def _number(name: str, value: Any, low: float, high: float) -> None:
    limits = f"at least {low:g}" if high == sys.float_info.max else f"between {low:g} and {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}={_show(value)}: expected a number {limits}")
    if not low <= value <= high:  # false for a NaN
        raise RequestError(f"{name}={_show(value)}: must be a finite number {limits}")


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    limits = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={_show(value)}: expected a whole number {limits}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}={_show(value)}: must be {limits}")
    if value > MAX_INTEGER:
        raise RequestError(f"{name}={_show(value)}: must be at most {MAX_INTEGER}")


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={_show(value)}: expected true or false")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name}={_show(value)}: expected a list of token ids")
    ids = tuple(value)
    if len(ids) > MAX_ALLOWED_TOKENS:
        raise RequestError(f"{name}: {len(ids)} of them; at most {MAX_ALLOWED_TOKENS} may be given")
    for token in ids:
        _integer(name, token, 0, None)
    kept = tuple(dict.fromkeys(ids))
    if name == "stop_token_ids" and len(kept) > MAX_STOP_TOKENS:
        raise RequestError(f"{name}: {len(kept)} of them; at most {MAX_STOP_TOKENS} may be given")
    return kept


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    expected = "expected a mapping from token ids to numbers between -100 and 100"
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise RequestError(f"logit_bias={_show(value)}: {expected}")
    pairs = list(value.items() if isinstance(value, Mapping) else value)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(f"logit_bias={_show(value)}: {expected}")
        _integer("logit_bias", pair[0], 0, None)
        _number(f"logit_bias[{_show(pair[0])}]", pair[1], -100.0, 100.0)
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError(f"logit_bias={_show(value)}: an id is named twice; name it once")
    return tuple(sorted((token, float(bias)) for token, bias in pairs))


def _words(name: str, value: Any, most: int) -> tuple[str, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name}={_show(value)}: expected a list of strings")
    words = tuple(value)
    if len(words) > most:
        raise RequestError(f"{name}: {len(words)} strings; at most {most} are allowed")
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_WORD_LENGTH:
            raise RequestError(f"{name}={_show(word)}: expected a string of 1 to {MAX_WORD_LENGTH} characters")
        if not is_text(word):
            raise RequestError(f"{name}={_show(word)}: it holds a lone surrogate, which no text does; leave it out")
    return words


def is_text(word: str) -> bool:
    """Whether UTF-8 can carry it: a lone surrogate stands for no character."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(value: object) -> str:
    """A value for a message: short, on one line."""
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return f"a number of more than {MAX_SHOWN} digits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
