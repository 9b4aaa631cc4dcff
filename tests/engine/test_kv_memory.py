"""Sharing, keeping and moving KV blocks never changes an answer: on the cpu backend not one bit of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, LLMEngine, RequestOutput, SamplingParams
from octavo.core import most_blocks
from tests.engine.test_prefix_cache import answers
from tests.tiny import make_gemma, make_llama

VOCABULARY = 300
SYSTEM = [7 + i * 5 % 280 for i in range(300)]  # longer than a piece of attention, 256 positions
LONGEST = 410
NO_LIMIT = 2000  # blocks
WINDOWS = {"llama": [None], "gemma": [None, 40, 40, 40]}  # of the models' groups of layers

Answers = Callable[..., list[Any]]


def prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Most begin with a part of SYSTEM, of any length."""
    rng = random.Random(seed)
    return [
        {
            "prompt_token_ids": SYSTEM[: rng.choice((0, 16, 70, 300, 300, 300))]
            + [rng.randrange(5, VOCABULARY) for _ in range(rng.randrange(1, 30))]
        }
        for _ in range(count)
    ]


def params(count: int, seed: int) -> list[SamplingParams]:
    rng = random.Random(seed + 1000)
    return [
        SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1000),
            n=rng.choice((1, 1, 3)),
            max_tokens=rng.randrange(1, 80),
            logprobs=3,
            prompt_logprobs=rng.choice((None, None, None, 1)),
            ignore_eos=True,
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("kv-memory")
    return {
        "llama": make_llama(directory / "llama", max_position_embeddings=LONGEST),
        "gemma": make_gemma(directory / "gemma", max_position_embeddings=LONGEST),
    }


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Answers:
    """Each request alone, nothing cached, the prompt in one step, each choice computed on its own."""
    known: dict[tuple[str, int, str], list[Any]] = {}

    def compute(name: str, seed: int, kv_cache_dtype: str = "auto") -> list[Any]:
        if (name, seed, kv_cache_dtype) not in known:
            options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
            options |= {"enable_prefix_caching": False, "max_num_seqs": 1, "num_kv_blocks": NO_LIMIT, "num_threads": 1}
            with LLM(str(models[name]), backend="cpu", **options) as llm:
                pairs = zip(prompts(COUNT, seed), params(COUNT, seed), strict=True)
                known[name, seed, kv_cache_dtype] = answers([llm.generate(*pair)[0] for pair in pairs])
        return known[name, seed, kv_cache_dtype]

    return compute


COUNT = 14
# How the KV memory is kept; a pool that is too small holds one of the longest requests, and a part of another.
MEMORY: dict[str, dict[str, Any]] = {
    "roomy": {},
    "roomy-uncached": {"enable_prefix_caching": False},
    "recompute": {"preemption_mode": "recompute"},
    "recompute-uncached": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 26},
    "small-swap": {"preemption_mode": "swap", "swap_space_bytes": 80_000},
    "auto": {"swap_space_bytes": 1 << 26},
}


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "cascade"), [(6, True), (17, True), (64, True), (64, False), (2048, True)])
@pytest.mark.parametrize("memory", list(MEMORY))
@pytest.mark.parametrize("model", list(WINDOWS))
def test_nothing_changes_one_bit(
    models: dict[str, Path], reference: Answers, model: str, memory: str, budget: int, cascade: bool
) -> None:
    """{cold, warm cache} x {recompute, swap, no preemption} x {chunk sizes} x {batch mates} x {cascade on, off}."""
    check_every_bit(models, reference, model, memory, budget, cascade)


@pytest.mark.parametrize("memory", ["recompute", "swap"])
@pytest.mark.parametrize("model", list(WINDOWS))
def test_nothing_changes_one_bit_of_int8_keys_and_values(
    models: dict[str, Path], reference: Answers, model: str, memory: str
) -> None:
    check_every_bit(models, reference, model, memory, 64, True, kv_cache_dtype="int8")


def check_every_bit(
    models: dict[str, Path],
    reference: Answers,
    model: str,
    memory: str,
    budget: int,
    cascade: bool,
    kv_cache_dtype: str = "auto",
) -> None:
    expected = reference(model, budget, kv_cache_dtype)
    tight = most_blocks(LONGEST, 16, WINDOWS[model], budget) * 8 // 5
    options = {"num_kv_blocks": NO_LIMIT if memory.startswith("roomy") else tight, **MEMORY[memory]}
    options |= {
        "kv_cache_dtype": kv_cache_dtype,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": budget,
        "max_model_len": LONGEST,
    }
    with LLM(str(models[model]), backend="cpu", num_threads=1, **options) as llm:
        program = llm.engine._core.executor._worker._runner.backend._program
        program.set_cascade(cascade)
        cold, shared = run(llm.engine, program, budget)
        assert answers(cold) == expected
        before = llm.stats()
        warm, _ = run(llm.engine, program, budget)
        assert answers(warm) == expected
        check_that_it_happened(before, llm.stats(), options)
        caching = options.get("enable_prefix_caching", True)
        assert (shared > 0) == cascade if caching else shared == 0 or cascade  # without it, only choices share


def run(engine: LLMEngine, program: Any, seed: int) -> tuple[list[RequestOutput], int]:
    """Requests come in while others run, and often are more urgent. Also says how many positions were shared."""
    waiting = list(zip(range(COUNT), prompts(COUNT, seed), params(COUNT, seed), strict=True))
    finished: dict[str, RequestOutput] = {}
    shared = 0
    while waiting or engine.has_unfinished_requests:
        for _ in range(min(len(waiting), 2)):
            i, prompt, wanted = waiting.pop(0)
            engine.add_request(str(i), prompt, wanted, priority=-(i % 5))
        for _ in range(4):
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            shared += program.shared_positions
    return [finished[str(i)] for i in range(COUNT)], shared


def check_that_it_happened(cold: dict[str, float], both: dict[str, float], options: Any) -> None:
    caching = options.get("enable_prefix_caching", True)
    tight = options["num_kv_blocks"] < NO_LIMIT
    swaps = "swap_space_bytes" in options
    assert (both["num_preemptions"] > cold["num_preemptions"] > 0) == tight
    assert (both["prefix_cache_hits"] > cold["prefix_cache_hits"] > 0) == caching
    if options.get("preemption_mode") == "swap":
        assert both["num_preemptions_swap"] == both["num_preemptions"]
        assert both["num_swapped_out_blocks"] > 0
        assert both["num_swapped_in_blocks"] > cold["num_swapped_in_blocks"] > 0
        assert both["num_restored_tokens"] > 0
    elif not swaps:
        assert both["num_preemptions_swap"] == both["num_swapped_out_blocks"] == 0
    assert both["num_forks"] > 0
    assert both["num_block_copies"] > 0
    assert both["num_used_blocks"] == 0
    assert both["num_free_blocks"] + both["num_cached_blocks"] == options["num_kv_blocks"]
