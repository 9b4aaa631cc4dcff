"""Sampling parameters on the whole road: what a request asks for is what its tokens show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, LLMEngine, RequestError, RequestOutput, SamplingParams
from octavo.engine.messages import SequenceOutput
from octavo.engine.outputs import OutputProcessor
from octavo.outputs import RequestMetrics
from tests.tiny import make_llama

PROMPTS = ["the quick brown", "a", "numbers such as 1 2 3", "forest " * 12]
KNOWN = 320  # ids of the tokeniser; the model has 384


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), num_kv_blocks=512, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def restless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model for which most tokens end a text: configuration and generation configuration name different ones."""
    path = make_llama(tmp_path_factory.mktemp("models") / "restless", eos_token_id=list(range(200)))
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, *range(200, 310), 383]}))
    with LLM(str(path), num_kv_blocks=512, num_threads=1) as llm:
        yield llm


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **values})


def run(llm: LLM, prompt: str = PROMPTS[0], **values: object) -> RequestOutput:
    return llm.generate(prompt, params(**values))[0]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


class TestMinTokens:
    """CASES 15."""

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_no_end_token_before_the_minimum(self, restless: LLM, temperature: float) -> None:
        ends = set(restless.engine.tokenizer.eos_token_ids)
        assert ends >= {*range(310), 383}
        own = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=20, min_tokens=i % 9, stop_token_ids=[315, 383])
            for i in range(27)
        ]
        lengths = []
        for one, output in zip(own, restless.generate(["the"] * 27, own), strict=True):
            (tokens,) = tokens_of(output)
            assert not {*tokens[: one.min_tokens]} & {*ends, 315}
            lengths.append(len(tokens) - one.min_tokens)
        assert lengths.count(1) > 20  # most end at once when they may

    def test_without_it_they_end_at_once(self, restless: LLM) -> None:
        outputs = restless.generate(["the"] * 20, SamplingParams())
        assert sum(len(tokens_of(output)[0]) == 1 for output in outputs) > 15

    def test_end_tokens_stay_banned_when_they_are_ignored(self, restless: LLM) -> None:
        tokens = tokens_of(run(restless, min_tokens=10, max_tokens=16))[0]
        assert {*tokens[:10]} <= {*range(310, KNOWN)}
        assert {*tokens[10:]} & {*range(310)}

    def test_nor_a_stop_string(self, llm: LLM) -> None:
        free = run(llm, temperature=0).outputs[0]
        text = llm.engine.tokenizer.decode(free.token_ids[4:6])
        early = run(llm, temperature=0, stop=text).outputs[0]
        late = run(llm, temperature=0, stop=text, min_tokens=8).outputs[0]
        assert len(early.token_ids) <= 6
        assert late.token_ids[: len(early.token_ids)] == early.token_ids
        assert len(late.token_ids) > 8


class TestIds:
    @pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
    def test_allowed_token_ids(self, llm: LLM, temperature: float) -> None:
        allowed = [5, 70, 300, 319]
        outputs = llm.generate(PROMPTS, params(temperature=temperature, allowed_token_ids=allowed))
        assert {token for output in outputs for token in tokens_of(output)[0]} <= {*allowed}

    def test_one_allowed_id_is_the_output(self, llm: LLM) -> None:
        output = run(llm, allowed_token_ids=[42], logprobs=1, seed=1)
        assert tokens_of(output) == [[42] * 16]
        assert all(entry[42].logprob < -0.01 for entry in output.outputs[0].logprobs)  # of the model's distribution

    def test_biases_force_and_forbid(self, llm: LLM) -> None:
        free = tokens_of(run(llm, temperature=0))[0]
        assert tokens_of(run(llm, temperature=0, logit_bias={free[0]: -100}))[0][0] != free[0]
        assert free[0] not in tokens_of(run(llm, temperature=0, logit_bias={free[0]: -100}))[0]
        assert tokens_of(run(llm, seed=1, logit_bias={77: 100})) == [[77] * 16]

    def test_a_hot_bias_never_samples_padding(self, llm: LLM) -> None:
        """CASES 11."""
        hot = params(temperature=1000.0, logit_bias={3: 50}, presence_penalty=2.0, max_tokens=60)
        assert max(token for output in llm.generate(["a"] * 8, hot) for token in tokens_of(output)[0]) < KNOWN

    @pytest.mark.parametrize(
        "values", [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.0, "presence_penalty": 1.0}]
    )
    def test_prompt_ids_that_the_tokeniser_does_not_know(self, llm: LLM, values: dict) -> None:
        prompt = {"prompt_token_ids": [5, 383, 330, 5]}
        assert max(tokens_of(llm.generate(prompt, params(**values))[0])[0]) < KNOWN


class TestBadWords:
    def test_a_word_of_one_token(self, llm: LLM) -> None:
        """As a word and after a space: ` and` is another token than `and`."""
        encode = llm.engine.tokenizer.encode
        (bare,), (spaced,) = encode("and"), encode(" and")
        both = {bare, spaced}
        assert len(both) == 2
        bias = {bare: 9, spaced: 9}
        assert both <= {*tokens_of(run(llm, seed=1, logit_bias=bias))[0]}
        for word in ("and", " and"):
            assert not both & {*tokens_of(run(llm, seed=1, logit_bias=bias, bad_words=[word]))[0]}

    def test_a_word_of_several_tokens_bans_only_its_end(self, llm: LLM) -> None:
        encode = llm.engine.tokenizer.encode
        word = encode("xyz")
        assert len(word) == 3
        only = {"allowed_token_ids": sorted({*word}), "max_tokens": 200}
        free = run(llm, seed=2, **only)
        assert "xyz" in free.outputs[0].text
        banned = run(llm, seed=2, bad_words=["xyz"], **only)
        assert "xyz" not in banned.outputs[0].text
        assert (word[0], word[1]) in [*pairwise(tokens_of(banned)[0])]  # its beginning may stand there
        assert {*tokens_of(banned)[0]} == {*word}

    def test_only_the_output_counts(self, llm: LLM) -> None:
        """The prompt ends with the word's beginning: its end may follow, as in vLLM."""
        word = llm.engine.tokenizer.encode("xyz")
        output = run(llm, "a text that ends in xy", allowed_token_ids=[word[2]], bad_words=["xyz"], max_tokens=1)
        assert tokens_of(output) == [[word[2]]]

    def test_spaces_and_line_breaks_are_words_too(self, llm: LLM) -> None:
        encode = llm.engine.tokenizer.encode
        for word in (" ", "\n"):
            (token,) = encode(word)
            bias = {token: 20}
            assert token in tokens_of(run(llm, seed=1, logit_bias=bias))[0]
            assert token not in tokens_of(run(llm, seed=1, logit_bias=bias, bad_words=[word]))[0]

    def test_when_nothing_is_left_later_that_request_fails_alone(self, llm: LLM) -> None:
        x, y = llm.engine.tokenizer.encode("xy")
        doomed = params(allowed_token_ids=[x, y], bad_words=["xx", "xy", "yy", "yx"])
        outputs = llm.generate(["a", "a"], [doomed, params(temperature=0)])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert len(outputs[0].outputs[0].token_ids) == 1
        assert "no token is left to sample" in outputs[0].error
        assert outputs[1].error is None
        assert outputs[1].outputs[0].token_ids == tokens_of(run(llm, "a", temperature=0))[0]


MIXED = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 0.7},
    {"temperature": 0.0, "repetition_penalty": 2.0, "min_p": 0.1},
    {"min_p": 0.2, "bad_words": ["the", "fox"], "min_tokens": 30},
    {"logit_bias": {70: 4.0, 80: -4.0}, "allowed_token_ids": list(range(3, 300)), "presence_penalty": 2.0},
    {},
]


def mixed(max_tokens: int) -> list[SamplingParams]:
    return [params(seed=i, max_tokens=max_tokens, **values) for i, values in enumerate(MIXED)]


@pytest.mark.parametrize("options", [
    {"num_kv_blocks": 12},
    {"max_num_batched_tokens": 3},
    {"max_num_seqs": 2},
    {"block_size": 32},
])  # fmt: skip
def test_neither_preemption_nor_batching_changes_a_token(llm: LLM, tiny_llama: Path, options: dict) -> None:
    alone = [tokens_of(llm.generate("a single step", own)[0]) for own in mixed(60)]
    together = llm.generate(["a single step"] * len(MIXED), mixed(60))
    assert [tokens_of(output) for output in together] == alone
    with LLM(str(tiny_llama), **{"num_kv_blocks": 512, "num_threads": 1, **options}) as other:
        outputs = other.generate(["a single step"] * len(MIXED), mixed(60))
        assert (other.stats()["num_preemptions"] > 0) == ("num_kv_blocks" in options)
    assert [tokens_of(output) for output in outputs] == alone


def test_penalties_do_what_they_are_for(llm: LLM) -> None:
    """A loop that the greedy model falls into is left, and negative penalties make one."""

    def distinct(**values: object) -> int:
        return len({*tokens_of(run(llm, temperature=0, max_tokens=100, **values))[0]})

    plain = distinct()
    assert distinct(repetition_penalty=1.5) > plain
    assert distinct(presence_penalty=2.0) > plain
    assert distinct(frequency_penalty=2.0) > plain
    assert distinct(frequency_penalty=-2.0) < plain


class TestChoices:
    def test_seeded_choices_are_repeatable_and_differ(self, llm: LLM) -> None:
        """CASES 14."""
        first, second = (run(llm, n=4, seed=7, temperature=1) for _ in range(2))
        assert tokens_of(first) == tokens_of(second)
        assert len({tuple(tokens) for tokens in tokens_of(first)}) == 4
        assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
        assert first.finished
        assert len({completion.text for completion in first.outputs}) == 4
        assert tokens_of(run(llm, seed=7, temperature=1)) == tokens_of(first)[:1]

    def test_choices_do_not_depend_on_how_many_run_at_once(self, llm: LLM, tiny_llama: Path) -> None:
        expected = tokens_of(run(llm, n=5, seed=3, presence_penalty=1.0))
        with LLM(str(tiny_llama), num_kv_blocks=32, max_num_seqs=2, num_threads=1) as other:
            assert tokens_of(run(other, n=5, seed=3, presence_penalty=1.0)) == expected

    def test_greedy_choices_are_equal(self, llm: LLM) -> None:
        output = run(llm, n=3, temperature=0)
        assert tokens_of(output) == tokens_of(run(llm, temperature=0)) * 3

    def test_requests_without_a_seed_get_different_ones(self, llm: LLM) -> None:
        outputs = llm.generate(["a", "a"], params(n=2))
        assert len({tuple(tokens) for output in outputs for tokens in tokens_of(output)}) == 4

    def test_each_choice_ends_for_itself(self, llm: LLM) -> None:
        free = run(llm, n=4, seed=7)
        stop = free.outputs[2].token_ids[3]
        ended = run(llm, n=4, seed=7, stop_token_ids=[stop])
        for one, whole in zip(ended.outputs, free.outputs, strict=True):
            stops = stop in whole.token_ids
            end = whole.token_ids.index(stop) + 1 if stops else 16
            assert one.token_ids == whole.token_ids[:end]
            assert (one.finish_reason, one.stop_reason) == (("stop", stop) if stops else ("length", None))

    def test_logprobs_of_each_choice_and_of_the_prompt_once(self, llm: LLM) -> None:
        output = run(llm, n=3, seed=1, logprobs=1, prompt_logprobs=0)
        single = run(llm, seed=1, prompt_logprobs=0)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for many, one in zip(output.prompt_logprobs[1:], single.prompt_logprobs[1:], strict=True):
            assert [*many] == [*one]
        for completion in output.outputs:
            assert len(completion.logprobs) == 16
            total = sum(entry[t].logprob for t, entry in zip(completion.token_ids, completion.logprobs, strict=True))
            assert completion.cumulative_logprob == pytest.approx(total)

    def test_the_best_of_several(self, llm: LLM) -> None:
        """By mean logprob per token; their lengths differ."""
        values = {"seed": 11, "stop_token_ids": list(range(100, 130)), "temperature": 1.2}
        every = run(llm, n=8, logprobs=0, **values).outputs
        assert len({len(one.token_ids) for one in every}) > 2
        ranked = sorted(every, key=lambda one: -one.cumulative_logprob / len(one.token_ids))
        best = run(llm, n=3, best_of=8, **values)
        assert tokens_of(best) == [one.token_ids for one in ranked[:3]]
        assert [one.text for one in best.outputs] == [one.text for one in ranked[:3]]
        assert [one.index for one in best.outputs] == [0, 1, 2]
        assert all(one.logprobs is None and one.cumulative_logprob is None for one in best.outputs)
        shown = run(llm, n=1, best_of=8, logprobs=2, **values).outputs[0]
        assert shown.token_ids == ranked[0].token_ids
        assert shown.cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob)

    def test_a_choice_that_fails_is_never_the_best(self, llm: LLM) -> None:
        """Of the first tokens x and y only x leaves a second one; the others' outputs go on."""
        x, y = llm.engine.tokenizer.encode("xy")
        values = {
            "allowed_token_ids": [x, y],
            "bad_words": ["yx", "yy"],
            "seed": 1,
            "max_tokens": 3,
            "temperature": 9.0,
        }
        every = run(llm, n=12, **values)
        failed = [one for one in every.outputs if one.finish_reason == "error"]
        assert 0 < len(failed) < 12
        assert "no token is left" in every.error
        for one in every.outputs:
            assert (y in one.token_ids[:2]) == (one.finish_reason == "error")
        best = run(llm, n=12 - len(failed), best_of=12, **values)
        assert all(one.finish_reason == "length" for one in best.outputs)
        assert best.error is None

    def test_a_million_choices_are_refused_at_once(self, llm: LLM) -> None:
        """CASES 12."""
        start = time.perf_counter()
        for name in ("n", "best_of"):
            with pytest.raises(RequestError, match=f"{name}=1000000: must be between 1 and 128"):
                run(llm, **{name: 1_000_000})
        assert time.perf_counter() - start < 1

    def test_as_many_as_are_allowed(self, llm: LLM) -> None:
        output = run(llm, "a", n=128, max_tokens=2)
        assert [one.index for one in output.outputs] == list(range(128))
        assert all(len(one.token_ids) == 2 for one in output.outputs)

    def test_metrics_are_of_the_whole_request(self, llm: LLM) -> None:
        """From the first choice that did it to the last: the second starts first, the first has the first token."""
        processor = OutputProcessor(llm.engine.tokenizer)
        processor.add("x", None, llm.engine.process_prompt("a", params(n=2)))
        first, second = processor._live
        own = [RequestMetrics(2.0, 0.5, 3.0, 16, 1), RequestMetrics(0.5, 3.0, 6.0, 0, 2)]
        for seq_id, metrics in zip((first, second), own, strict=True):
            ((output,), _) = processor.process([SequenceOutput(seq_id, 5, finish_reason="length", metrics=metrics)])
        assert output.finished
        assert output.metrics == RequestMetrics(0.5, 2.0, 7.0, 0, 3)

    def test_queued_choices_count_too(self, tiny_llama: Path) -> None:
        with LLM(str(tiny_llama), num_kv_blocks=64, max_num_seqs=1, num_threads=1) as llm:
            start = time.perf_counter()
            metrics = run(llm, n=3).metrics
            wall = time.perf_counter() - start
        assert 0 < metrics.prefill_time < metrics.decode_time < wall


class TestSteps:
    @pytest.fixture
    def engine(self, tiny_llama: Path) -> Iterator[LLMEngine]:
        engine = LLMEngine.from_options(str(tiny_llama), num_kv_blocks=64, num_threads=1)
        yield engine
        engine.close()

    def test_a_request_moves_once_a_step_and_grows(self, engine: LLMEngine) -> None:
        engine.add_request("x", "the quick", params(n=3, seed=1))
        for count in range(1, 17):
            (output,) = engine.step()
            assert [len(tokens) for tokens in tokens_of(output)] == [count] * 3
            assert output.finished is (count == 16)
        assert not engine.has_unfinished_requests

    def test_places_of_the_best_stay_empty_until_the_end(self, engine: LLMEngine) -> None:
        engine.add_request("x", "the quick", params(n=2, best_of=3, seed=1))
        for _ in range(15):
            (output,) = engine.step()
            assert [(one.index, one.text, one.token_ids) for one in output.outputs] == [(0, "", []), (1, "", [])]
        (output,) = engine.step()
        assert output.finished
        assert [len(one.token_ids) for one in output.outputs] == [16, 16]

    def test_abort_ends_all_choices_and_keeps_what_is_there(self, engine: LLMEngine) -> None:
        free = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
        engine.add_request("free", "the", free)
        while engine.has_unfinished_requests:
            (output,) = engine.step()
        stop = output.outputs[1].token_ids[1]
        engine.add_request("x", "the", params(n=3, seed=7, stop_token_ids=[stop]))
        engine.add_request("y", "the", params(n=2))
        for _ in range(4):
            engine.step()
        aborted = engine.abort("x")
        assert aborted.finished
        reasons = [one.finish_reason for one in aborted.outputs]
        assert reasons[1] == "stop"
        assert "abort" in reasons
        assert all(len(one.token_ids) == 4 for one in aborted.outputs if one.finish_reason == "abort")
        assert engine.abort("x") is None
        engine.abort("y")
        assert not engine.has_unfinished_requests
        assert engine.stats()["num_used_blocks"] == 0

    def test_generated_tokens_are_counted(self, engine: LLMEngine) -> None:
        engine.add_request("x", "the quick", params(n=2, best_of=3, max_tokens=5))
        while engine.has_unfinished_requests:
            engine.step()
        assert engine.stats()["num_generated_tokens"] == 15


class TestRefusals:
    @pytest.mark.parametrize(("values", "message"), [
        ({"logit_bias": {KNOWN: 1.0}}, f"logit_bias: {KNOWN} is not a token id; the model's are 0 to {KNOWN - 1}"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias: 1000000000 is not a token id"),
        ({"allowed_token_ids": [3, 383]}, "allowed_token_ids: 383 is not a token id"),
        ({"allowed_token_ids": []}, "allowed_token_ids=.*nothing could be sampled"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids: .* forbid all 1 of them"),
        ({"allowed_token_ids": [0, 9], "min_tokens": 1, "stop_token_ids": [9]}, "min_tokens=1 .* forbid all 2 of them"),
        ({"bad_words": ["\ud800"]}, "lone surrogate"),
    ])  # fmt: skip
    def test_names_the_value_and_the_limit_and_the_next_is_served(self, llm: LLM, values: dict, message: str) -> None:
        """CASES 8 and 9."""
        with pytest.raises(RequestError, match=message):
            run(llm, **values)
        assert llm.stats()["num_waiting"] == 0
        assert run(llm, temperature=0).finished

    def test_allowed_and_bad_words_that_contradict(self, llm: LLM) -> None:
        """CASES 9."""
        (x,) = llm.engine.tokenizer.encode("x")
        with pytest.raises(RequestError, match=r"allowed_token_ids: bad_words, .* forbid all 1 of them"):
            run(llm, allowed_token_ids=[x], bad_words=["x"])
        assert tokens_of(run(llm, allowed_token_ids=[x, 77], bad_words=["x"])) == [[77] * 16]


def test_min_p_keeps_what_the_model_s_own_probabilities_say(llm: LLM) -> None:
    """Each sampled token has at least that share of the most likely one, at temperature 1."""
    for output in llm.generate(PROMPTS, params(min_p=0.3, seed=5, logprobs=1, max_tokens=60)):
        ratios = []
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            ratios.append(entry[token].logprob - max(value.logprob for value in entry.values()))
        assert min(ratios) >= np.log(0.3) - 1e-6
        assert sum(ratio < 0 for ratio in ratios) > 5
