"""The order of requests changes who is served when, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput

SHARED = "the quick brown fox jumps over the lazy dog, numbers such as 1 2 3, "
PROMPTS = [
    *({"prompt": f"a single step {i}", "cache_salt": "one user"} for i in range(6)),
    {"prompt": SHARED + "a", "cache_salt": "another"},
    {"prompt": SHARED + "forest", "cache_salt": "another"},
]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=40, n=2, ignore_eos=True)


def generate(path: Path, policy: str, **options: int) -> tuple[list[list[list[int]]], list[int], int]:
    """The tokens of every choice, the requests in the order in which they began, and how often one was preempted."""
    with LLM(str(path), num_threads=1, scheduling_policy=policy, **{"num_kv_blocks": 256, **options}) as llm:
        llm.generate({"prompt": SHARED, "cache_salt": "another"}, PARAMS)
        outputs: list[RequestOutput] = llm.generate(PROMPTS, PARAMS)
        stats = llm.stats()
    assert stats["num_used_blocks"] == stats["num_waiting"] == 0
    began = sorted(range(len(outputs)), key=lambda i: outputs[i].metrics.queue_time)
    return [[choice.token_ids for choice in output.outputs] for output in outputs], began, stats["num_preemptions"]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[list[int]]]:
    tokens, began, _ = generate(tiny_llama, "fcfs", max_num_seqs=2)
    assert began == list(range(len(PROMPTS)))
    return tokens


def test_fair_gives_the_same_tokens_in_another_order(tiny_llama: Path, expected: list[list[list[int]]]) -> None:
    tokens, began, _ = generate(tiny_llama, "fair", max_num_seqs=2)
    assert tokens == expected
    assert began.index(7) < 6  # two users in turn


def test_longest_prefix_gives_the_same_tokens_in_another_order(
    tiny_llama: Path, expected: list[list[list[int]]]
) -> None:
    tokens, began, _ = generate(tiny_llama, "longest-prefix", max_num_seqs=2)
    assert tokens == expected
    assert set(began[:2]) == {6, 7}  # their prompts are cached


@pytest.mark.parametrize("policy", ["fair", "longest-prefix"])
def test_nor_do_preemptions_and_chunks_change_any(
    tiny_llama: Path, expected: list[list[list[int]]], policy: str
) -> None:
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "num_kv_blocks": 8}
    tokens, _, preemptions = generate(tiny_llama, policy, **options)
    assert preemptions > 0
    assert tokens == expected
