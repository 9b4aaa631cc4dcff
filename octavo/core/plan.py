"""What the scheduler tells the workers each step, and what they answer. Plain data that can cross a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.outputs import TokenLogprobs
from octavo.sampling_params import NO_BANS, Bans, SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """All that a worker needs to know of a sequence, sent once: when it first runs."""

    seq_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    choice: int
    bans: Bans = NO_BANS


@dataclass(slots=True)
class StepPlan:
    """Who computes how many tokens in this step. `seq_ids`, `starts` and `num_tokens` are parallel.

    A sequence whose `start + num_tokens` reaches its last known token samples the next one; workers keep the tokens
    and block tables that they were told of, so only differences are sent.
    """

    new: list[NewSequence] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the first token to compute
    num_tokens: list[int] = field(default_factory=list)
    new_blocks: dict[int, list[int]] = field(default_factory=dict)  # to append to the block table, by seq_id
    preempted: list[int] = field(default_factory=list)  # seq_ids whose block tables are void
    finished: list[int] = field(default_factory=list)  # seq_ids to forget

    def __bool__(self) -> bool:
        return bool(self.seq_ids)


@dataclass(slots=True)
class StepResult:
    """What came of a StepPlan."""

    token_ids: list[int]  # parallel to StepPlan.seq_ids; -1 where a sequence sampled nothing
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # of the sampled token, by seq_id, where asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of prompt tokens, in order
    errors: dict[int, str] = field(default_factory=dict)  # sequences that cannot go on, by seq_id
