"""What a worker remembers of its sequences between steps, in arrays that a step indexes and never rebuilds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core import StepPlan
from octavo.sampling import Feature, History, Shaping, features_of
from octavo.sampling_params import SamplingParams


@dataclass(slots=True)
class _Known:
    """The part of a sequence's state that outlives its slot."""

    params: SamplingParams
    seed: int
    choice: int
    prompt_length: int
    is_beam: bool
    features: tuple[Feature, ...]
    tokens: NDArray[np.int32]  # while it holds no slot; stale while it does
    logprobs_from: int = 1  # position of the first prompt token whose logprob was not reported yet


class RequestSlots:
    """One row for each sequence that runs; a preempted one gives its row up and keeps only its tokens.

    ::

                    tokens [slot, position]        block_table [0, slot, block]    length  temperature  seed ...
        slot 0      [ 11 12 13 14 42  .  . ]       [ 7 2 . . ]                     5       0.0          8
        slot 1      [ 90 91  .  .  .  .  . ]       [ 5 . . . ]                     2       0.7          3
        slot 2      (free)

    There is a block table for each group of layers, and all of a slot are equally long. Block 0 stands where the plan
    says NOTHING: nobody looks. Rows are committed to memory only as far as they were ever written.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.tokens = np.empty((max_num_seqs, max_model_len + 1), np.int32)  # one more: a scored prompt may be full
        self.block_table = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self.length = np.zeros(max_num_seqs, np.int32)  # known tokens
        self.num_blocks = np.zeros(max_num_seqs, np.int32)  # of each group
        self.temperature = np.zeros(max_num_seqs, np.float64)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.choice = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.is_beam = np.zeros(max_num_seqs, np.bool_)
        self._shaped: dict[int, _Known] = {}  # by slot: those that want their logits changed
        self._known: dict[int, _Known] = {}
        self._slot_of: dict[int, int] = {}
        self._free = list(range(max_num_seqs))[::-1]

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, plan: StepPlan) -> NDArray[np.intp]:
        """Takes the plan's differences in; returns the slot of each planned sequence."""
        for seq_id in plan.finished:
            self._leave_slot(seq_id)
            del self._known[seq_id]
        for seq_id in plan.preempted:
            slot = self._leave_slot(seq_id)
            if slot is not None:
                self._known[seq_id].tokens = self.tokens[slot, : self.length[slot]].copy()
        for new in plan.new:
            tokens = np.array(new.tokens, np.int32)
            features = features_of(new.params, new.bans)
            self._known[new.seq_id] = _Known(
                new.params, new.seed, new.choice, new.prompt_length, new.is_beam, features, tokens
            )
        slot_of = self._slot_of
        slots = np.array([slot_of[s] if s in slot_of else self._take_slot(s) for s in plan.seq_ids], np.intp)
        self._put_in_tails(plan)
        for seq_id, blocks in plan.new_blocks.items():
            slot = slot_of[seq_id]
            held = self.num_blocks[slot]
            stop = self.num_blocks[slot] = held + len(blocks[0])
            for table, more in zip(self.block_table, blocks, strict=True):
                table[slot, held:stop] = np.maximum(more, 0)
        return slots

    def _put_in_tails(self, plan: StepPlan) -> None:
        starts = dict(zip(plan.seq_ids, plan.starts, strict=True)) if plan.tails else {}
        for seq_id, blocks in plan.tails.items():
            slot = self._slot_of[seq_id]
            if self.num_blocks[slot] > 0:  # else its table comes with the copies in it
                for table, block in zip(self.block_table, blocks, strict=True):
                    table[slot, starts[seq_id] // self.block_size] = max(block, 0)

    def append(self, slots: NDArray[np.intp], tokens: NDArray[np.int32]) -> None:
        """Each of these sequences has sampled its next token."""
        self.tokens[slots, self.length[slots]] = tokens
        self.length[slots] += 1

    def learn(self, seq_ids: list[int], token_ids: list[int]) -> None:
        """What another worker has sampled for these, -1 for nothing. Some may have lost their slots since, or ended."""
        for seq_id, token in zip(seq_ids, token_ids, strict=True):
            known = self._known.get(seq_id)
            if token < 0 or known is None or known.is_beam:
                continue
            slot = self._slot_of.get(seq_id)
            if slot is None:
                known.tokens = np.append(known.tokens, np.int32(token))
            else:
                self.tokens[slot, self.length[slot]] = token
                self.length[slot] += 1

    def shaping(self, slots: NDArray[np.intp]) -> list[Shaping | None]:
        """What changes the logits that follow the last known token of each of these."""
        if not self._shaped:
            return [None] * len(slots)
        return [self._shaping(slot) if slot in self._shaped else None for slot in slots.tolist()]

    def prompt_rows(self, seq_id: int, start: int, count: int) -> tuple[int, int]:
        """Positions [first, last) of this step at which the next token is one of the prompt, not yet reported."""
        known = self._known[seq_id]
        first = max(start, known.logprobs_from - 1)
        last = min(start + count, known.prompt_length - 1)
        return first, max(first, last)

    def prompt_row_reported(self, seq_id: int) -> None:
        """The next of those rows has its logprobs; it will not be asked for again."""
        self._known[seq_id].logprobs_from += 1

    def _take_slot(self, seq_id: int) -> int:
        slot = self._free.pop()
        self._slot_of[seq_id] = slot
        known = self._known[seq_id]
        params = known.params
        self.length[slot] = len(known.tokens)
        self.tokens[slot, : len(known.tokens)] = known.tokens
        self.num_blocks[slot] = 0
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = known.seed
        self.choice[slot] = known.choice
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.is_beam[slot] = known.is_beam
        if known.features:
            self._shaped[slot] = known
        return slot

    def _shaping(self, slot: int) -> Shaping:
        known = self._shaped[slot]
        return Shaping(known.features, History(self.tokens[slot, : self.length[slot]], known.prompt_length))

    def _leave_slot(self, seq_id: int) -> int | None:
        slot = self._slot_of.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)
            self._shaped.pop(slot, None)
        return slot
