"""What is computed once is found again, by whoever may, and gives the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams

ROOMY = {"num_kv_blocks": 128, "num_threads": 1}
SYSTEM = [7 + i * 5 % 280 for i in range(70)]  # four blocks of 16, and a part


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """All of a result that a caller can compare: floats too, as they are."""
    return [
        (output.prompt_logprobs, [(c.token_ids, c.logprobs, c.cumulative_logprob, c.text) for c in output.outputs])
        for output in outputs
    ]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_warm_prompt_gives_the_cold_one_s_answer(tiny_llama: Path, backend: str) -> None:
    """Case 28. On torch the tokens; on cpu the logprobs too, bit by bit."""
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    with LLM(str(tiny_llama), backend=backend, **ROOMY) as llm:
        (cold,) = llm.generate({"prompt_token_ids": SYSTEM}, greedy)
        (warm,) = llm.generate({"prompt_token_ids": SYSTEM}, greedy)
        assert (cold.metrics.num_cached_tokens, warm.metrics.num_cached_tokens) == (0, 64)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        if backend == "cpu":
            assert answers([warm]) == answers([cold])
        longer = SYSTEM + cold.outputs[0].token_ids + [9]  # the next turn of a conversation
        (next_turn,) = llm.generate({"prompt_token_ids": longer}, greedy)
        assert next_turn.metrics.num_cached_tokens == 80  # the last of 24 tokens was never computed


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_requests_that_arrive_together_compute_their_prefix_once(tiny_llama: Path, backend: str) -> None:
    batch = [{"prompt_token_ids": [*SYSTEM, 5 + i]} for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(tiny_llama), backend=backend, **ROOMY) as llm:
        together = llm.generate(batch, greedy)
        assert llm.stats()["num_tokens"] == 71 + 7 * 7 + 8 * 5
        assert [output.metrics.num_cached_tokens for output in together] == [0] + [64] * 7
    with LLM(str(tiny_llama), backend=backend, enable_prefix_caching=False, **ROOMY) as llm:
        alone = [llm.generate(prompt, greedy)[0] for prompt in batch]
        assert llm.stats()["prefix_cache_queries"] == 0
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_sixteen_choices_cost_one_prefill(tmp_path: Path, backend: str) -> None:
    from tests.tiny import make_llama

    path = make_llama(tmp_path / "long", max_position_embeddings=1100)
    prompt = {"prompt_token_ids": [5 + i * 7 % 290 for i in range(1000)]}
    sampled = SamplingParams(n=16, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    with LLM(str(path), backend=backend, max_num_batched_tokens=512, **ROOMY) as llm:
        engine = llm.engine
        engine.add_request("x", prompt, sampled)
        engine.step()
        engine.step()
        assert engine.stats()["num_tokens"] == 1000
        snapshot = llm.kv_snapshot()
        assert [(s.request_id, s.choice) for s in snapshot.sequences] == [("x", choice) for choice in range(16)]
        assert len(snapshot.owners) == 63
        assert all(len(owners) == 16 for owners in snapshot.owners.values())
        engine.step()
        stats = engine.stats()
        assert (stats["num_used_blocks"], stats["num_tokens"]) == (62 + 16, 1016)
        while engine.has_unfinished_requests:
            (output,) = engine.step()
        choices = [choice.token_ids for choice in output.outputs]
        assert len({tuple(tokens) for tokens in choices}) > 10
        assert engine.stats()["num_block_copies"] == 15
    with LLM(str(path), backend=backend, enable_prefix_caching=False, max_num_seqs=1, **ROOMY) as llm:
        (output,) = llm.generate(prompt, sampled)
        assert llm.stats()["num_forks"] == 0
    assert [choice.token_ids for choice in output.outputs] == choices


def test_prompt_logprobs_of_a_cached_prompt_are_all_there(tiny_llama: Path) -> None:
    asked = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, n=2)
    with LLM(str(tiny_llama), **ROOMY) as llm:
        (cold,) = llm.generate({"prompt_token_ids": SYSTEM}, asked)
        (warm,) = llm.generate({"prompt_token_ids": SYSTEM}, asked)
    assert len(warm.prompt_logprobs) == 70
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.metrics.num_cached_tokens == 0


class TestSalt:
    def test_only_requests_of_one_salt_share(self, tiny_llama: Path) -> None:
        text = "the quick brown fox jumps over the lazy dog and runs into the forest, a journey of a thousand miles"
        one = SamplingParams(max_tokens=1)
        with LLM(str(tiny_llama), **ROOMY) as llm:
            count = len(llm.engine.tokenizer.encode(text)) // 16 * 16
            assert count > 0
            found = []
            for salt in (None, "a", "b", "a", None):
                (output,) = llm.generate({"prompt": text, "cache_salt": salt}, one)
                assert output.prompt == text
                found.append(output.metrics.num_cached_tokens)
            (output,) = llm.generate(text, one)
            assert [*found, output.metrics.num_cached_tokens] == [0, 0, 0, count, count, count]
            ids = {"prompt_token_ids": output.prompt_token_ids}
            assert llm.generate({**ids, "cache_salt": "b"}, one)[0].metrics.num_cached_tokens == count
            assert llm.generate({**ids, "cache_salt": "c"}, one)[0].metrics.num_cached_tokens == 0


def test_a_step_that_fails_leaves_nothing_wrong_to_be_found(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of these computes the prefix; the step fails before it is stored, so all is computed again."""
    batch = [{"prompt_token_ids": [*SYSTEM, 5 + i]} for i in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    with LLM(str(tiny_llama), **ROOMY) as llm:
        expected = answers(llm.generate(batch, greedy))
    with LLM(str(tiny_llama), **ROOMY) as llm:
        backend = type(llm.engine._core.executor._worker._runner.backend)

        def fails(*_: Any) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(backend, "execute", fails)
            with pytest.raises(MemoryError):
                llm.generate(batch, greedy)
        assert llm.stats()["num_cached_blocks"] == 0
        found = llm.generate(batch, greedy)
        assert answers(found) == expected
        assert found[0].metrics.num_cached_tokens == 0
