"""Steps in flight give what one at a time gives, bit for bit: a scheduler that plans ahead changes nothing but time.

The executor here holds plans back, as a pipeline does, and has a second runner that samples nothing and is told the
tokens late, as the workers of a pipeline are: it must ask its backend for the very same work.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.backends.base import Batch
from octavo.core import StepPlan, StepResult
from octavo.engine import llm_engine
from octavo.executor import LocalExecutor
from octavo.sampling import Sampled, SamplingRows
from octavo.worker.model_runner import ModelRunner
from tests.worker.test_model_runner import Recorder

SHARED = "the quick brown fox jumps over the lazy dog, numbers such as 1 2 3, "


class Elsewhere(Recorder):
    """Another worker computes and samples; moves take no time."""

    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled | None:  # type: ignore[override]
        super().execute(batch, rows)
        return None

    def move_blocks(self, moves: Any) -> None:
        pass


class Ahead(LocalExecutor):
    """Runs a plan only when it is collected, `ahead` of them in flight."""

    ahead = 1
    most = 0  # in flight, so far

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight: deque[StepPlan] = deque()
        runner = self._open_worker()._runner
        self._first = runner.backend
        slots = runner.slots
        self._second = ModelRunner(
            Elsewhere(len(self._first.kv_groups)),
            block_size=runner.block_size,
            max_num_seqs=len(slots.length),
            max_model_len=slots.tokens.shape[1] - 1,
        )
        self._untold: deque[list[int]] = deque()
        self._seen: list[Batch] = []
        execute = self._first.execute

        def watched(batch: Batch, rows: SamplingRows) -> Sampled | None:
            self._seen.append(batch)
            return execute(batch, rows)

        self._first.execute = watched  # type: ignore[method-assign]

    @property
    def depth(self) -> int:
        return self.ahead

    def submit(self, plan: StepPlan) -> None:
        """The tokens that have been collected are told with the plan, before it."""
        while self._untold:
            self._second.learn(self._untold.popleft())
        self._second.execute(plan)
        self._in_flight.append(plan)
        type(self).most = max(type(self).most, len(self._in_flight))

    def collect(self) -> StepResult:
        super().submit(self._in_flight.popleft())
        result = super().collect()
        self._untold.append(result.token_ids)
        assert_same(self._seen.pop(), self._second.backend.batches.pop(0))
        return result


def assert_same(mine: Batch, theirs: Batch) -> None:
    for name in Batch.__slots__:
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), name)


def generate(
    monkeypatch: pytest.MonkeyPatch, path: Path, depth: int, **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """All that came of a mixed load: tokens, logprobs and why each ended."""
    monkeypatch.setattr(Ahead, "ahead", depth)
    monkeypatch.setattr(Ahead, "most", 0)
    monkeypatch.setattr(llm_engine, MAKER, Ahead)
    prompts = [*(SHARED[: 7 + 5 * i] for i in range(8)), SHARED + "a single step", SHARED + "forest"]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, n=2, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with LLM(str(path), backend="cpu", num_threads=1, **options) as llm:
        outputs = llm.generate(prompts[:5], params)
        outputs += llm.generate(prompts, SamplingParams(temperature=0.7, seed=3, max_tokens=30, logprobs=1))
        beams = llm.beam_search(prompts[:4], BeamSearchParams(beam_width=3, max_tokens=12))
        stats = llm.stats()
    assert Ahead.most == depth
    found = [
        [(c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason) for c in output.outputs]
        for output in [*outputs, *beams]
    ]
    return [found, [output.prompt_logprobs for output in outputs]], stats


MAKER = "make_executor"
POOLS = {
    "ample": {"num_kv_blocks": 400},
    "small": {"num_kv_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 6},
    "swap": {"num_kv_blocks": 24, "max_num_seqs": 6, "swap_space_bytes": 1 << 20, "preemption_mode": "swap"},
}


@pytest.mark.parametrize("pool", POOLS)
def test_the_same_bits_at_every_depth(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, pool: str) -> None:
    options = POOLS[pool]
    one, _ = generate(monkeypatch, tiny_llama, 1, **options)
    for depth in (2, 3):
        found, stats = generate(monkeypatch, tiny_llama, depth, **options)
        assert found == one
        assert (stats["num_preemptions"] > 0) == (pool != "ample")
        assert stats["prefix_cache_hits"] > 0
        assert stats["num_used_blocks"] == stats["num_waiting"] == stats["num_running"] == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_aborts_in_flight(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, depth: int) -> None:
    """Of sequences, and of a beam search: what is still to come for them is dropped."""
    monkeypatch.setattr(Ahead, "ahead", depth)
    monkeypatch.setattr(llm_engine, MAKER, Ahead)
    engine = llm_engine.LLMEngine.from_options(str(tiny_llama), backend="cpu", num_threads=1, num_kv_blocks=100)
    for i in range(6):
        engine.add_request(f"{i}", SHARED[: 9 + i], SamplingParams(max_tokens=15, ignore_eos=True, prompt_logprobs=1))
    engine.add_request("beams", SHARED, BeamSearchParams(beam_width=3, max_tokens=15))
    ended: dict[str, str] = {}
    steps = 0
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0].finish_reason
        steps += 1
        if steps % 4 == 0 and f"{steps // 4}" not in ended and steps // 4 < 4:
            engine.abort(f"{steps // 4}")
        if steps == 9:
            engine.abort("beams")
    assert {ended[i] for i in ("0", "4", "5")} == {"length"}
    assert engine.stats()["num_used_blocks"] == 0
    engine.close()
