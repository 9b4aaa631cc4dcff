"""From a plan to arrays, through the backend, to sampled tokens."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Backend, Batch
from octavo.core import StepPlan, StepResult
from octavo.sampling import NOT_FINITE, NOTHING_LEFT, Sampled, SamplingRows
from octavo.worker.request_slots import RequestSlots

Index = NDArray[np.intp]

_FAILURES = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinite)",
    NOTHING_LEFT: "no token is left to sample: allowed_token_ids, bad_words, min_tokens and penalties together leave "
    "none of a finite logit; ban less",
}


@dataclass(frozen=True, slots=True)
class _LogitRows:
    """Which rows of the step need logits, and what for; sorted by row."""

    row: Index  # [S]
    owner: Index  # [S]; index of the sequence in the plan
    target: NDArray[np.int32]  # [S]; the prompt token whose logprob is asked for, or -1 to sample


class ModelRunner:
    """Keeps the sequences' state between steps and drives the backend, one call a step."""

    def __init__(self, backend: Backend, *, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.backend = backend
        self.block_size = block_size
        self.slots = RequestSlots(max_num_seqs, max_model_len, block_size, len(backend.kv_groups))
        self._untold: deque[list[int]] = deque()  # seq_ids of steps whose tokens another worker samples

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step; None where another worker samples, whose tokens `learn` has then to be told."""
        slots = self.slots.apply(plan)
        move_seconds = self._move_blocks(plan)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.num_tokens, np.int64)
        logit_rows = self._logit_rows(plan, slots, starts, counts)
        computing = counts > 0  # the others sample from a row of the sequence before them
        batch = self._batch(slots[computing], starts[computing], counts[computing], logit_rows.row)
        sampled = self.backend.execute(batch, self._sampling_rows(slots, starts + counts, logit_rows))
        for owner in logit_rows.owner[logit_rows.target >= 0].tolist():
            self.slots.prompt_row_reported(plan.seq_ids[owner])
        if sampled is None:
            self._untold.append(plan.seq_ids)
            return None
        result = self._result(plan, slots, logit_rows, sampled)
        result.move_seconds = move_seconds
        return result

    def learn(self, token_ids: list[int]) -> None:
        """The `StepResult.token_ids` of the oldest step that has not been told of, before a later plan is executed."""
        self.slots.learn(self._untold.popleft(), token_ids)

    def _move_blocks(self, plan: StepPlan) -> float:
        """The seconds that it took."""
        if not plan.moves:
            return 0.0
        start = time.perf_counter()
        self.backend.move_blocks(plan.moves)
        return time.perf_counter() - start

    def _batch(self, slots: Index, starts: NDArray[np.int64], counts: NDArray[np.int64], logit_rows: Index) -> Batch:
        query_starts = np.concatenate([[0], np.cumsum(counts)])
        row_slots = np.repeat(slots, counts)
        positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, counts)
        blocks = self.slots.block_table[:, row_slots, positions // self.block_size].astype(np.int64)  # [G, T]
        most_blocks = self.slots.num_blocks[slots].max()
        return Batch(
            token_ids=self.slots.tokens[row_slots, positions],
            positions=positions.astype(np.int32),
            slot_mapping=np.ascontiguousarray(blocks * self.block_size + positions % self.block_size),
            query_starts=query_starts.astype(np.int32),
            context_lens=(starts + counts).astype(np.int32),
            block_tables=self._block_tables(slots, int(most_blocks)),
            logit_rows=logit_rows.astype(np.int32),
        )

    def _block_tables(self, slots: Index, width: int) -> NDArray[np.int32]:
        """Rows keep what earlier tenants of their slots wrote: blank it, so that none of their blocks is ever named."""
        tables = self.slots.block_table[:, :, :width].take(slots, axis=1)
        tables[:, np.arange(width) >= self.slots.num_blocks[slots, None]] = 0
        return tables

    def _logit_rows(
        self, plan: StepPlan, slots: Index, starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> _LogitRows:
        """The last row of each sequence that computes its last known token, and the prompt rows that were asked for.

        A sequence without a token to compute ends at the same row as the one before it, from which it was forked.
        """
        ends = np.cumsum(counts)
        owner = np.flatnonzero(starts + counts == self.slots.length[slots])
        row = ends[owner] - 1
        target = np.full(len(owner), -1, np.int32)
        asking = np.flatnonzero(self.slots.num_prompt_logprobs[slots] >= 0)
        if len(asking) == 0:
            return _LogitRows(row, owner, target)
        rows, owners, targets = [row], [owner], [target]
        for i in asking:
            first, last = self.slots.prompt_rows(plan.seq_ids[i], int(starts[i]), int(counts[i]))
            positions = np.arange(first, last)
            rows.append(positions - starts[i] + ends[i] - counts[i])
            owners.append(np.full(len(positions), i))
            targets.append(self.slots.tokens[slots[i], positions + 1])
        row, owner, target = np.concatenate(rows), np.concatenate(owners), np.concatenate(targets)
        order = np.argsort(row, kind="stable")  # a row is wanted by several only to sample from
        return _LogitRows(row[order], owner[order], target[order])

    def _sampling_rows(self, slots: Index, ends: NDArray[np.int64], rows: _LogitRows) -> SamplingRows:
        own = slots[rows.owner]
        state = self.slots
        return SamplingRows(
            temperature=state.temperature[own],
            top_k=state.top_k[own],
            top_p=state.top_p[own],
            min_p=state.min_p[own],
            seed=state.seed[own],
            choice=state.choice[own],
            position=ends[rows.owner].astype(np.uint64),
            num_logprobs=np.where(rows.target >= 0, state.num_prompt_logprobs[own], state.num_logprobs[own]),
            target=rows.target,
            shaping=state.shaping(own),
        )

    def _result(self, plan: StepPlan, slots: Index, rows: _LogitRows, sampled: Sampled) -> StepResult:
        result = StepResult(token_ids=[-1] * len(plan.seq_ids))
        samples = (rows.target < 0) & (sampled.token_ids >= 0)
        owners = rows.owner[samples]
        grows = ~self.slots.is_beam[slots[owners]]  # of the others, the group goes on with new sequences
        self.slots.append(slots[owners[grows]], sampled.token_ids[samples][grows])
        for owner, token in zip(owners.tolist(), sampled.token_ids[samples].tolist(), strict=True):
            result.token_ids[owner] = token
        for i in np.flatnonzero(sampled.token_ids < 0):
            result.errors[plan.seq_ids[rows.owner[i]]] = _FAILURES[int(sampled.token_ids[i])]
        for owner, target, entry in zip(rows.owner.tolist(), rows.target.tolist(), sampled.logprobs, strict=True):
            seq_id = plan.seq_ids[owner]
            if entry is None:
                continue
            if target < 0:
                result.logprobs[seq_id] = entry
            else:
                result.prompt_logprobs.setdefault(seq_id, []).append(entry)
        return result
