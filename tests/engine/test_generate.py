"""The whole road on a tiny model: prompts in, outputs out, whatever the scheduler does on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from octavo import LLM, RequestError, RequestOutput, SamplingParams
from octavo.tokenizer import load_tokenizer
from tests.tiny import make_llama

PROMPTS = ["the quick brown", "a", "numbers such as 1 2 3", "forest " * 20, "miles, begins! with? a single step"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path):
    with LLM(str(tiny_llama), num_kv_blocks=256, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path):
    """In float32, as transformers computes it."""
    with LLM(str(tiny_llama), backend="torch", num_kv_blocks=256, num_threads=1) as llm:
        yield llm


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def reference(path: Path, prompt_ids: list[int], output_ids: list[int], known: int) -> torch.Tensor:
    """transformers' logits at the positions that predict the output, teacher-forced, cut to the tokeniser's ids."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([prompt_ids + output_ids])).logits[0, len(prompt_ids) - 1 : -1, :known]


def test_greedy_equals_transformers(oracle: LLM, tiny_llama: Path) -> None:
    for output in oracle.generate(PROMPTS, GREEDY):
        logits = reference(tiny_llama, output.prompt_token_ids, output.outputs[0].token_ids, 320)
        top = logits.topk(2).values
        for chosen, row, (best, second) in zip(output.outputs[0].token_ids, logits, top, strict=True):
            assert row[chosen] == best or best - second < 1e-3


def test_outputs_are_complete_and_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert output.error is None
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 24
        assert completion.text == llm.engine.tokenizer.decode(completion.token_ids)
        assert completion.logprobs is None
        assert output.prompt_logprobs is None
        assert min(output.metrics.queue_time, output.metrics.prefill_time, output.metrics.decode_time) >= 0


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 7},
    {"max_num_seqs": 1},
    {"block_size": 32},
    {"block_size": 48, "max_num_batched_tokens": 16},
    {"num_kv_blocks": 16, "max_model_len": 256},
    {"scheduling_policy": "priority", "enable_prefix_caching": False},
])  # fmt: skip
def test_no_schedule_changes_the_tokens(llm: LLM, tiny_llama: Path, options: dict) -> None:
    expected = ids(llm.generate(PROMPTS, GREEDY))
    with LLM(str(tiny_llama), **{"num_kv_blocks": 1024, "num_threads": 1, **options}) as other:
        assert ids(other.generate(PROMPTS, GREEDY)) == expected


def test_preemption_changes_neither_tokens_nor_lengths(llm: LLM, tiny_llama: Path) -> None:
    """CASES 30: a pool so small that sequences are preempted and recomputed."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    prompts = ["the quick brown fox", "numbers such as 1 2 3", "a single step"]
    calm = llm.generate(prompts, params)
    with LLM(str(tiny_llama), num_kv_blocks=6, num_threads=1) as cramped:
        outputs = cramped.generate(prompts, params)
        stats = cramped.stats()
    assert stats["num_preemptions"] > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == stats["num_preemptions"]
    assert stats["num_used_blocks"] == 0
    assert ids(outputs) == ids(calm)
    for output, expected in zip(outputs, calm, strict=True):
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert [list(entry) for entry in output.prompt_logprobs[1:]] == [
            list(entry) for entry in expected.prompt_logprobs[1:]
        ]
        assert len(output.outputs[0].logprobs) == 60


def test_seeded_samples_do_not_depend_on_their_batch_mates(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    alone = ids(llm.generate(PROMPTS[2], params))[0]
    mates = SamplingParams(temperature=1.3, max_tokens=30, ignore_eos=True)
    together = llm.generate([*PROMPTS, PROMPTS[2]], [mates] * len(PROMPTS) + [params])
    assert ids(together)[-1] == alone
    assert ids(llm.generate(PROMPTS[2], SamplingParams(temperature=1.0, seed=8, max_tokens=16)))[0] != alone


def test_engine_seed_makes_whole_runs_repeatable(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with LLM(str(tiny_llama), num_kv_blocks=64, seed=seed, num_threads=1) as llm:
            runs.append(ids(llm.generate(["a", "a", "the"], params)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]  # requests without a seed draw different ones


def test_tiny_temperatures_are_greedy(llm: LLM) -> None:
    """CASES 6."""
    expected = ids(llm.generate(PROMPTS, GREEDY))
    for top_p in (1.0, 1e-4):
        params = SamplingParams(temperature=1e-4, top_p=top_p, max_tokens=24, ignore_eos=True, logprobs=1)
        outputs = llm.generate(PROMPTS, params)
        assert ids(outputs) == expected
        assert all(o.outputs[0].cumulative_logprob == o.outputs[0].cumulative_logprob for o in outputs)


def test_logprobs_equal_transformers(oracle: LLM, tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    for output in oracle.generate(PROMPTS, params):
        completion, prompt = output.outputs[0], output.prompt_token_ids
        expected = reference(tiny_llama, prompt, completion.token_ids, 320).double().log_softmax(-1)
        for token, entry, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
            assert next(iter(entry)) == token
            assert 4 <= len(entry) <= 5
            for candidate, value in entry.items():
                assert value.logprob == pytest.approx(float(row[candidate]), abs=1e-3)
                assert value.rank == 1 + int((row > row[candidate]).sum())
                assert value.decoded_token == oracle.engine.tokenizer.token_text(candidate)
        total = sum(
            entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)
        assert output.prompt_logprobs[0] is None
        rows = reference(tiny_llama, prompt[:1], prompt[1:], 320).double().log_softmax(-1)
        for token, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], rows, strict=True):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_logprobs_of_a_prompt_and_one_more_token(llm: LLM) -> None:
    """CASES 25 and 26, offline: an entry for each token of the prompt, the first None, and one for the new token; the
    tokens' texts, joined, are the prompt, a newline at its start too."""
    prompt = "\nthe quick  brown\n\nfox 123"
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate(prompt, params)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert len(output.outputs[0].logprobs) == 1
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    texts = [llm.engine.tokenizer.token_text(output.prompt_token_ids[0])]
    texts += [entry[token].decoded_token for token, entry in entries]
    assert "".join(texts) == prompt


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_the_real_models_tokens_join_to_their_text(model: str, request: pytest.FixtureRequest) -> None:
    """CASES 26: without BOS."""
    checkpoint = request.getfixturevalue(model)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.metadata, checkpoint.config, checkpoint.generation_config)
    for text in ("\nHello world", " two  spaces\n", "Hello\n\nworld 42!"):
        ids = [token for token in tokenizer.encode(text) if token != tokenizer.bos_token_id]
        assert "".join(map(tokenizer.token_text, ids)) == text


def test_stop_tokens(llm: LLM) -> None:
    free = llm.generate("the quick", GREEDY)[0].outputs[0]
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    completion = llm.generate("the quick", params)[0].outputs[0]
    assert completion.token_ids == free.token_ids[: first + 1]  # the token itself is kept ...
    assert completion.text == llm.engine.tokenizer.decode(free.token_ids[:first])  # ... but not its text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_stops_on_the_union_of_all_end_tokens_unless_told_to_ignore_them(tiny_llama: Path, tmp_path: Path) -> None:
    """CASES 16 and 17: config, generation config and tokeniser name different end-of-sequence tokens."""
    with LLM(str(tiny_llama), num_kv_blocks=64, num_threads=1) as llm:
        free = llm.generate("the quick", GREEDY)[0].outputs[0].token_ids
    for source in ("config", "generation", "tokenizer"):
        path = make_llama(tmp_path / source, eos_token_id=2)
        stop = next(token for token in free if token > 2)
        if source == "config":
            edit_json(path / "config.json", eos_token_id=[2, stop])
        elif source == "generation":
            edit_json(path / "generation_config.json", eos_token_id=stop)
        else:
            token = Tokenizer.from_file(str(path / "tokenizer.json")).id_to_token(stop)
            edit_json(path / "tokenizer_config.json", eos_token=token)
        with LLM(str(path), num_kv_blocks=64, num_threads=1) as llm:
            assert stop in llm.engine.tokenizer.eos_token_ids
            params = SamplingParams(temperature=0, max_tokens=24)
            completion = llm.generate("the quick", params)[0].outputs[0]
            assert completion.token_ids == free[: free.index(stop) + 1]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
            assert llm.generate("the quick", GREEDY)[0].outputs[0].token_ids == free


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_padding_ids_are_never_sampled(tiny_llama: Path, tmp_path: Path) -> None:
    """CASES 11: the embedding has 384 rows, the tokeniser 320; a hot temperature would reach all of them."""
    with LLM(str(tiny_llama), num_kv_blocks=256, num_threads=1) as llm:
        assert llm.engine.tokenizer.vocab_size < llm.engine.model_config.vocab_size
        params = SamplingParams(temperature=100.0, max_tokens=200, ignore_eos=True)
        for tokens in ids(llm.generate(["a"] * 8, params)):
            assert max(tokens) < llm.engine.tokenizer.vocab_size


class TestScoring:
    """max_tokens=0 (CASES 2 and 3, offline): the prompt comes back with its logprobs, and nothing is generated."""

    @pytest.mark.parametrize("chunk", [2048, 7])
    def test_a_prompt_as_long_as_the_context(self, llm: LLM, tiny_llama: Path, chunk: int) -> None:
        prompt = {"prompt_token_ids": [3 + i * 7 % 300 for i in range(256)]}
        generated = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
        with LLM(str(tiny_llama), num_kv_blocks=16, num_threads=1, max_num_batched_tokens=chunk) as other:
            (scored,) = other.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=2))
        (expected,) = llm.generate({"prompt_token_ids": prompt["prompt_token_ids"][:255]}, generated)
        assert scored.prompt_logprobs[:255] == expected.prompt_logprobs
        assert len(scored.prompt_logprobs) == 256
        completion = scored.outputs[0]
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")

    def test_without_logprobs_too_and_never_stopped_by_an_end_token(self, llm: LLM) -> None:
        every = SamplingParams(max_tokens=0, stop_token_ids=tuple(range(320)), stop="e", logprobs=1)
        (output,) = llm.generate("the quick", every)
        completion = output.outputs[0]
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
        assert (completion.logprobs, completion.cumulative_logprob, completion.stop_reason) == ([], 0.0, None)

    def test_a_prompt_longer_than_the_context(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="the prompt has 257 tokens; the context holds 256: shorten"):
            llm.generate({"prompt_token_ids": [5] * 257}, SamplingParams(max_tokens=0))


class TestRefusals:
    """Each names the value and the limit, and nothing else is lost."""

    def test_prompt_as_long_as_the_context(self, llm: LLM) -> None:
        """CASES 3."""
        with pytest.raises(RequestError, match=r"prompt 0: the prompt has 256 tokens; the context holds 256"):
            llm.generate({"prompt_token_ids": [5] * 256})
        outputs = llm.generate({"prompt_token_ids": [5] * 255}, SamplingParams(temperature=0, max_tokens=9))
        assert len(outputs[0].outputs[0].token_ids) == 1
        assert outputs[0].outputs[0].finish_reason == "length"

    def test_empty_prompt(self, llm: LLM, tmp_path: Path) -> None:
        """CASES 1: refused without a BOS token; the next request is served. With one it is a prompt."""
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.generate("")
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.generate({"prompt_token_ids": []})
        assert llm.generate("a", GREEDY)[0].finished
        path = make_llama(tmp_path / "bos", adds_bos=True)
        with LLM(str(path), num_kv_blocks=64, num_threads=1) as other:
            output = other.generate("", GREEDY)[0]
            assert output.prompt_token_ids == [1]
            assert len(output.outputs[0].token_ids) == 24

    def test_all_prompts_are_checked_before_any_runs(self, llm: LLM) -> None:
        before = llm.stats()["num_tokens"]
        with pytest.raises(RequestError, match=r"prompt 1: prompt_token_ids: 384 is not a token id; .* 0 to 383"):
            llm.generate(["fine", {"prompt_token_ids": [3, 384]}], GREEDY)
        assert llm.stats()["num_tokens"] == before
        assert llm.stats()["num_waiting"] == 0

    @pytest.mark.parametrize(("prompt", "message"), [
        ({"prompt_token_ids": [-1]}, "-1 is not a token id"),
        ({"prompt_token_ids": [1.5]}, "1.5 is not a token id"),
        ({"prompt_token_ids": [True]}, "True is not a token id"),
        ({"prompt_token_ids": "abc"}, "expected a list"),
        ({"prompt": 7}, "expected text, "),
        ({"prompt": "abc", "prompt_token_ids": [5]}, "expected text, "),
        ({"prompt": "abc", "cache_salt": ""}, "cache_salt=.*: expected text of 1 to 1024 characters"),
        ({"prompt_token_ids": [5], "cache_salt": 7}, "cache_salt=7: expected text"),
        (17, "prompt 17: expected text, "),
    ])  # fmt: skip
    def test_malformed_prompts(self, llm: LLM, prompt: object, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], GREEDY)

    def test_padding_ids_have_no_logprob(self, llm: LLM) -> None:
        """383 is a row of the embedding and no token: it may stand in a prompt, but the sampler knows nothing of it."""
        prompt = {"prompt_token_ids": [5, 383, 6]}
        assert llm.generate(prompt, GREEDY)[0].finished
        with pytest.raises(RequestError, match=r"prompt_token_ids with prompt_logprobs: 383 is not .* to 319"):
            llm.generate(prompt, SamplingParams(prompt_logprobs=0))

    def test_prompt_ids_in_an_array(self, llm: LLM) -> None:
        outputs = llm.generate([{"prompt_token_ids": np.array([5, 6])}, {"prompt_token_ids": [5, 6]}], GREEDY)
        assert ids(outputs)[0] == ids(outputs)[1]

    def test_stop_token_past_the_vocabulary(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="stop_token_ids: 384 is not a token id"):
            llm.generate("a", SamplingParams(stop_token_ids=(384,)))

    def test_as_many_parameters_as_prompts(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY])
        with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
            llm.generate(["a", "b"], GREEDY, priority=[1])


def test_a_row_of_nan_fails_its_own_request_alone(tmp_path: Path) -> None:
    """An id whose embedding is NaN poisons every sequence that holds it, and no other: not in the same batch, and not
    the next tenants of its blocks."""
    from safetensors.torch import load_file, save_file

    path = make_llama(tmp_path / "nan")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with LLM(str(path), num_kv_blocks=8, num_threads=1) as llm:
        clean = ids(llm.generate("a single step", GREEDY))[0]
        for _ in range(3):
            good, bad = llm.generate(["a single step", {"prompt_token_ids": [5, 300, 6]}], GREEDY)
            assert good.outputs[0].token_ids == clean
            assert bad.outputs[0].finish_reason == "error"
            assert "not finite" in bad.error
        assert llm.stats()["num_used_blocks"] == 0


def test_two_engines_live_side_by_side(llm: LLM, tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), num_threads=1) as other:
        assert ids(other.generate(PROMPTS, GREEDY)) == ids(llm.generate(PROMPTS, GREEDY))
