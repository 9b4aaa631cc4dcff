"""One sequence on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from octavo.outputs import FinishReason
from octavo.sampling_params import NO_BANS, Bans, SamplingParams


class Status(Enum):
    WAITING = "waiting"  # never ran
    RUNNING = "running"  # holds blocks
    PREEMPTED = "preempted"  # ran, and lost its blocks to a sequence before it in the order
    FINISHED = "finished"


class Sequence:
    """Known tokens, and how many of them are computed: the scheduler only ever closes that gap.

    ::

        tokens        [ p p p p p p o o ]     p: prompt, o: sampled
        num_computed        ^ 3               K and V of the first three are in the cache once the planned step has run
        room                  ^ 4             up to here they can be stored without asking for a block
    """

    __slots__ = (
        "arrival_time",
        "bans",
        "block_keys",
        "block_tables",
        "cache_salt",
        "choice",
        "finish_reason",
        "finish_time",
        "first_scheduled_time",
        "first_token_time",
        "group",
        "is_beam",
        "key",
        "max_length",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "params",
        "priority",
        "prompt_length",
        "room",
        "seed",
        "seq_id",
        "status",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        tokens: list[int],
        params: SamplingParams,
        *,
        max_length: int,
        stop_token_ids: Collection[int] = (),
        bans: Bans = NO_BANS,
        seed: int = 0,
        choice: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        prompt_length: int | None = None,
        cache_salt: str | None = None,
        group: int | None = None,
        is_beam: bool = False,
    ) -> None:
        """
        Args:
            max_length: of prompt and sampled tokens together.
            prompt_length: `tokens` may go past the prompt (a replayed request); None: they do not.
            cache_salt: only sequences of the same salt share what is computed.
            group: sequences of one group were added one after the other with the same prompt, salt and priority.
            is_beam: what it samples is not appended; once all its tokens are computed it waits for `Scheduler.branch`.
        """
        self.seq_id = seq_id
        self.tokens = tokens
        self.prompt_length = len(tokens) if prompt_length is None else prompt_length
        self.params = params
        self.max_length = max_length
        self.stop_token_ids = frozenset(stop_token_ids)
        self.bans = bans
        self.seed = seed
        self.choice = choice
        self.priority = priority
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.key: tuple[int, ...] = ()  # place in the order; none while the policy has not decided
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.cache_salt = cache_salt
        self.group = group
        self.is_beam = is_beam
        self.num_computed = 0
        self.room = 0
        self.num_cached_tokens = 0  # of the prompt, found in the cache when it first ran
        self.num_preemptions = 0
        self.block_tables: list[list[int]] = []  # one for each group of layers, while it runs
        self.block_keys: list[bytes] = []  # of its first full blocks, as far as they were asked for

    @property
    def needs_all_logits(self) -> bool:
        """Whether logprobs of prompt tokens are still to be reported, so that every one of them must be computed."""
        return self.params.prompt_logprobs is not None and self.first_token_time is None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, {self.num_computed} of {len(self.tokens)} tokens computed, "
            f"blocks {self.block_tables})"
        )
