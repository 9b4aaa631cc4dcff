"""What the scheduler tells the workers each step, and what they answer. Plain data that can cross a socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
    is_beam: bool = False  # what it samples is not its next token: its group chooses, and goes on with new sequences


NOTHING = -1  # in a block table: nobody reads there, and no block is held


class BlockMove(NamedTuple):
    """A whole block is copied: within the KV cache, to the host tier, or back from there."""

    kind: Literal["copy", "swap_out", "swap_in"]
    source: int  # a block of the KV cache; of "swap_in", one of the host tier
    destination: int  # a block of the KV cache; of "swap_out", one of the host tier


@dataclass(slots=True)
class StepPlan:
    """Who computes how many tokens in this step. `seq_ids`, `starts` and `num_tokens` are parallel.

    A sequence whose `start + num_tokens` reaches its last known token samples the next one. One with no token to
    compute samples from the logits of the sequence before it, from which it was forked in this very step: n choices of
    one prompt::

        seq_ids      [   7     8     9 ]
        starts       [   0  1000  1000 ]
        num_tokens   [1000     0     0 ]     one prompt is computed, three tokens are sampled

    A sequence has a block table for each group of layers that keep equally much (`BlockManager`), all equally long.

    Workers keep the tokens and block tables that they were told of, so only differences are sent. Differences count as
    told even when the step fails. What they mean, in this order: forget `finished`, void the tables of `preempted`, get
    to know `new`, do the `moves`, put in the `tails`, append the `new_blocks`. A sequence may read blocks that others
    write in the same step: in each layer all keys and values of the step are stored before any are read.

    With a pipeline several plans are in flight, and only the workers of its last stage sample. The others are told what
    was sampled with a later plan: step by step, oldest first, and before that plan's differences. A plan that computes
    a token is made after the token has arrived, so it is told by then. A plan may preempt or finish a sequence whose
    token is still to be told: of a preempted one, the token goes to those that are kept without a table, and it is not
    planned again before every plan that it was in has been taken in; of a finished one, the token is dropped, and a
    seq_id that comes again waits for the same.
    """

    new: list[NewSequence] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the first token to compute
    num_tokens: list[int] = field(default_factory=list)
    # Done in order, since a block may be the source of one and the destination of another, and before the step writes
    # anything.
    moves: list[BlockMove] = field(default_factory=list)
    # By seq_id, one block a group: the block that the sequence's first token of this step goes into was shared, and
    # this copy takes its place in the table. (In the table of a sequence that begins in this step it has already.)
    tails: dict[int, list[int]] = field(default_factory=dict)
    # By seq_id, one list a group: what to append to the block tables. NOTHING where no token of the step, or of a later
    # one, looks: outside of the group's window.
    new_blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)  # seq_ids whose block tables are void; some may begin anew
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
    move_seconds: float = 0.0  # that the plan's moves took
