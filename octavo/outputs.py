"""What a request gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position as the sampler reports them, without text: of the token that stands there, and of the
    most likely ones (descending)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely; ties go to the lower id
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability under the model, before temperature and filters."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # by token id: the token that stands there, and the most likely ones


@dataclass(slots=True)
class RequestMetrics:
    """What one request cost. Times in seconds; of several choices, from the first that did a thing to the last."""

    queue_time: float = 0.0  # arrival to the first step that computed one of its tokens
    prefill_time: float = 0.0  # from there to its first sampled token
    decode_time: float = 0.0  # from there to its last
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; the least of its choices
    num_preemptions: int = 0  # summed over its choices


def combined_metrics(parts: Sequence[RequestMetrics]) -> RequestMetrics:
    """Of what arrived at one moment and belongs together: from the first that started to the last that ended."""
    started = min(m.queue_time for m in parts)
    first_token = min(m.queue_time + m.prefill_time for m in parts)
    end = max(m.queue_time + m.prefill_time + m.decode_time for m in parts)
    return RequestMetrics(
        queue_time=started,
        prefill_time=first_token - started,
        decode_time=end - first_token,
        num_cached_tokens=min(m.num_cached_tokens for m in parts),
        num_preemptions=sum(m.num_preemptions for m in parts),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of the generated tokens; None unless logprobs, or beams, were asked for
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string, or the token id of `stop_token_ids`, that ended it
    score: float | None = None  # of a beam: cumulative_logprob / len(token_ids) ** length_penalty


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come; `finished` says whether it goes on.

    `outputs` has n entries, in the order of their index. Text and token ids only ever grow. With `best_of` above n the
    entries stay empty until the request is finished: the best come first then. So it is with beams, which may be fewer
    than the width where there are no more.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # the first entry is None: nothing comes before it
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = False
    error: str | None = None  # why a choice's finish_reason is "error"
