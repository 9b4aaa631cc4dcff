"""Far more requests than the KV pool holds: all of them finish, each with the tokens that it gets alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, LLMEngine, RequestOutput, SamplingParams

COUNT = 200
BLOCK_SIZE = 16


def requests() -> list[tuple[dict[str, Any], SamplingParams]]:
    rng = random.Random(5)
    return [
        (
            {"prompt_token_ids": [rng.randrange(5, 300) for _ in range(rng.randint(4, 20))]},
            SamplingParams(
                temperature=rng.choice((0.0, 1.0)), seed=i, max_tokens=rng.randint(80, 120), ignore_eos=True, logprobs=1
            ),
        )
        for i in range(COUNT)
    ]


def working_set() -> int:
    """Blocks of all requests at their full length."""
    return sum(
        -(-(len(prompt["prompt_token_ids"]) + params.max_tokens - 1) // BLOCK_SIZE) for prompt, params in requests()
    )


def answer(output: RequestOutput) -> tuple[Any, ...]:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[Any]:
    """What each request gets when nothing else runs."""
    options = {"enable_prefix_caching": False, "max_num_seqs": 1, "num_kv_blocks": 64, "num_threads": 1}
    with LLM(str(tiny_llama), backend="cpu", **options) as llm:
        return [answer(llm.generate(prompt, params)[0]) for prompt, params in requests()]


MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "recompute-uncached": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 24},
    "auto": {"swap_space_bytes": 1 << 24},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "longest-prefix"])
@pytest.mark.parametrize("mode", list(MODES))
def test_all_finish_as_if_alone(tiny_llama: Path, alone: list[Any], mode: str, policy: str) -> None:
    options = {"num_kv_blocks": working_set() // 4, "max_num_seqs": COUNT, "num_threads": 1, **MODES[mode]}
    with LLM(str(tiny_llama), backend="cpu", scheduling_policy=policy, **options) as llm:
        for i, (prompt, params) in enumerate(requests()):
            llm.engine.add_request(str(i), prompt, params, priority=i % 7)
        finished = run_and_watch_progress(llm.engine)
        assert [answer(finished[str(i)]) for i in range(COUNT)] == alone
        stats = llm.stats()
        assert stats["num_preemptions"] >= 20
        assert stats["num_preemptions_swap"] <= stats["num_preemptions"]
        if mode == "swap":
            assert stats["num_preemptions_swap"] == stats["num_preemptions"]
            assert stats["num_swapped_in_blocks"] > 0
        assert sum(output.metrics.num_preemptions for output in finished.values()) == stats["num_preemptions"]


def run_and_watch_progress(engine: LLMEngine) -> dict[str, RequestOutput]:
    """To the end; nobody is preempted twice at the same length."""
    finished: dict[str, RequestOutput] = {}
    preempted_at: dict[int, tuple[int, int]] = {}  # by seq_id: how often, and how many tokens it had then
    while engine.has_unfinished_requests:
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        for sequence in engine._core.scheduler.sequences.values():
            times, length = preempted_at.get(sequence.seq_id, (0, 0))
            if sequence.num_preemptions > times:
                assert sequence.num_preemptions == times + 1
                assert len(sequence.tokens) > length
                preempted_at[sequence.seq_id] = sequence.num_preemptions, len(sequence.tokens)
    assert preempted_at
    return finished
