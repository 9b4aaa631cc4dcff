"""What a request for text may say, whichever endpoint it comes to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from octavo.metrics import log_event
from octavo.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from octavo.server.bodies import shown
from octavo.server.errors import APIError

_SAMPLING = [f.name for f in fields(SamplingParams)]
_MOST_LOGGED = 16  # names of unknown fields in one line of the log
_MOST_DIGITS = 18  # of a token id
MAX_BIASES = 300  # entries of logit_bias, as OpenAI's
LONG_LIST = 1024  # ids or characters; from here on it is checked in a thread

# OpenAI's fields that change nothing here, and that are no surprise.
_WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}

# What this server cannot do yet, and the values that do not ask for it. Anything else would be answered wrongly.
_NOT_YET: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class GenerationRequest(BaseModel):
    """The body of a request for text, as far as the endpoints have it in common.

    A field that is null, or missing, has its default, and the defaults are those of `SamplingParams`, which checks all
    of sampling: pydantic lets these fields through as they come.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_YET

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    # OpenAI's
    n: SkipValidation[int | None] = None
    temperature: SkipValidation[float | None] = None
    top_p: SkipValidation[float | None] = None
    presence_penalty: SkipValidation[float | None] = None
    frequency_penalty: SkipValidation[float | None] = None
    logit_bias: SkipValidation[dict[str, float] | None] = None
    seed: SkipValidation[int | None] = None
    max_tokens: SkipValidation[int | None] = None
    stop: SkipValidation[str | list[str] | None] = None
    # vLLM's
    best_of: SkipValidation[int | None] = None
    top_k: SkipValidation[int | None] = None
    min_p: SkipValidation[float | None] = None
    repetition_penalty: SkipValidation[float | None] = None
    allowed_token_ids: SkipValidation[list[int] | None] = None
    bad_words: SkipValidation[list[str] | None] = None
    min_tokens: SkipValidation[int | None] = None
    include_stop_str_in_output: SkipValidation[bool | None] = None
    stop_token_ids: SkipValidation[list[int] | None] = None
    ignore_eos: SkipValidation[bool | None] = None
    skip_special_tokens: SkipValidation[bool | None] = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    cache_salt: SkipValidation[str | None] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    async def sampling_params(self, **own: Any) -> SamplingParams:
        """`make_sampling_params`; where lists are so long that others would notice, in a thread."""
        if sum(map(_length, (self.allowed_token_ids, self.stop_token_ids, self.bad_words))) < LONG_LIST:
            return self.make_sampling_params(**own)
        return await asyncio.to_thread(self.make_sampling_params, **own)

    def make_sampling_params(self, **own: Any) -> SamplingParams:
        """
        Args:
            own: what the endpoint makes of its own fields, None too.

        Raises:
            RequestError: a value is refused.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING if name not in own}
        given["logit_bias"] = _by_token_id(self.logit_bias)
        given["seed"] = _unsigned(self.seed)
        return SamplingParams(**{name: value for name, value in given.items() if value is not None}, **own)

    def check(self) -> None:
        """
        Raises:
            APIError: 400, the request asks for what this server cannot do, or fields contradict each other.
        """
        extra = self.model_extra or {}
        for name, neutral in self.not_yet.items():
            value = extra.get(name)
            if value is not None and value not in neutral:
                raise APIError(400, f"{name}={shown(value)}: not supported; leave it out", param=name)
        unknown = [name for name in extra if name not in _WITHOUT_EFFECT and name not in self.not_yet]
        if unknown:
            log_event("unknown_fields", {"names": ",".join(name[:64] for name in unknown[:_MOST_LOGGED])})
        self._check_stream_options()
        if self.stream:
            self._check_stream()

    def _check_stream_options(self) -> None:
        if self.stream_options is None:
            return
        wanted = self.stream_options.get("include_usage")
        if wanted is not None and not isinstance(wanted, bool):
            message = f"stream_options: include_usage={shown(wanted)}: expected true or false"
            raise APIError(400, message, param="stream_options")
        if not self.stream:
            raise APIError(
                400, "stream_options is for streams: set stream to true, or leave it out", param="stream_options"
            )

    def _check_stream(self) -> None:
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise APIError(
                400,
                f"best_of={shown(self.best_of)}: which choices are the best is known at the end, so they cannot be "
                "streamed; leave out best_of or stream",
                param="best_of",
            )
        if self.prompt_logprobs is not None:
            raise APIError(
                400,
                f"prompt_logprobs={shown(self.prompt_logprobs)}: not in a stream; leave out prompt_logprobs or stream",
                param="prompt_logprobs",
            )


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _by_token_id(biases: object) -> object:
    """JSON has text as keys only."""
    if not isinstance(biases, Mapping):
        return biases
    if len(biases) > MAX_BIASES:
        raise APIError(
            400, f"logit_bias: {len(biases)} token ids; at most {MAX_BIASES} may be given", param="logit_bias"
        )
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS):
            raise APIError(400, f"logit_bias={shown(key)}: the keys are token ids, such as '42'", param="logit_bias")
    return {int(key): value for key, value in biases.items()}


def _unsigned(seed: object) -> object:
    """OpenAI's seeds have a sign: negative ones take the upper half of ours, as in two's complement."""
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        return seed & MAX_SEED
    return seed
