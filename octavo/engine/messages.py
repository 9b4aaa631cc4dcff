"""What crosses the border between the front-end (text) and the engine core (token ids). Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core import Hypothesis
from octavo.outputs import FinishReason, RequestMetrics, TokenLogprobs
from octavo.sampling_params import NO_BANS, Bans, BeamSearchParams, SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """Front-end to core: compute this sequence."""

    seq_id: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    max_length: int  # prompt and sampled tokens
    stop_token_ids: frozenset[int]  # end-of-sequence tokens included, unless they are ignored
    priority: int
    arrival_time: float  # seconds, time.monotonic()
    choice: int = 0  # the sequences of a request follow each other, with seq_ids that do
    bans: Bans = NO_BANS
    cache_salt: str | None = None
    sampled: list[int] = field(default_factory=list)  # by an engine that is no more, of this very sequence: they follow


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for, checked: one sequence for each choice. The sequences' own parameters may differ from
    the caller's, in what the sampler is to report."""

    params: SamplingParams
    sequences: list[SequenceRequest]


@dataclass(frozen=True, slots=True)
class BeamRequest:
    """Front-end to core: search for the best continuations of this prompt."""

    seq_id: int  # the first of `num_seq_ids` in a row: each beam, as it goes on, is a new sequence
    tokens: list[int]
    params: BeamSearchParams
    max_length: int  # as above, as are the others
    stop_token_ids: frozenset[int]
    priority: int
    arrival_time: float
    cache_salt: str | None = None

    @property
    def max_tokens(self) -> int:
        return self.max_length - len(self.tokens)

    @property
    def num_seq_ids(self) -> int:
        return 1 + self.params.beam_width * self.max_tokens


@dataclass(slots=True)
class SequenceOutput:
    """Core to front-end: what one step did for one sequence."""

    seq_id: int
    token_id: int | None = None  # None: only prompt tokens were computed, or the sequence ended without a token
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    # With the finish reason; and so far, with the first token and that after each preemption.
    metrics: RequestMetrics | None = None
    error: str | None = None
    position: int = 0  # of the token among those sampled for the sequence, in all lives
    prompt_position: int = 0  # of the first of `prompt_logprobs` among all of them

    @property
    def advances(self) -> bool:
        """Whether the sequence got on. Logprobs of its prompt do not count: another engine would have to compute that
        prompt from its start."""
        return self.token_id is not None or self.finish_reason is not None


@dataclass(slots=True)
class BeamOutput:
    """Core to front-end: a beam search is over."""

    seq_id: int  # the request's
    hypotheses: list[Hypothesis]  # best first
    metrics: RequestMetrics
    error: str | None = None
