"""`/v1/completions` on a live server, held against `LLM` on the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from tests.server.live import LiveServer
from tests.tiny import make_llama

PROMPT = "the quick brown fox"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in list(options) if name in VLLM}
    return client.completions.create(model="tiny", prompt=prompt, **{**GREEDY, **options}, extra_body=extra)


VLLM = {
    "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "ignore_eos", "include_stop_str_in_output",
    "min_p", "min_tokens", "priority", "prompt_logprobs", "repetition_penalty", "return_token_ids",
    "skip_special_tokens", "stop_token_ids", "top_k", "use_beam_search",
}  # fmt: skip


def test_the_answer_is_that_of_generate(client: openai.OpenAI, llm: LLM) -> None:
    answer = complete(client, ignore_eos=True, return_token_ids=True)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    expected = output.outputs[0]
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert choice.token_ids == expected.token_ids
    assert choice.prompt_token_ids == output.prompt_token_ids
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    assert answer._request_id == answer.id
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(output.prompt_token_ids), 12)
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert answer.timings.keys() == {"queue_time", "prefill_time", "decode_time", "num_preemptions"}
    assert answer.timings["decode_time"] > 0


def test_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    null = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=None, extra_body={"ignore_eos": True}
    )
    assert null.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_of_prompts(client: openai.OpenAI, llm: LLM, server: LiveServer, stream: bool) -> None:
    """Text or ids, n choices each; the index of a choice counts over all prompts."""
    texts = ["the quick", "a journey", "numbers such"]
    ids = [llm.engine.tokenizer.encode(text) for text in texts]
    options = {"temperature": 1.0, "seed": 3, "n": 2, "stream": stream}
    found = []
    for prompts in (texts, ids):
        choices = {}
        answer = complete(client, prompts, **options)
        for part in answer if stream else [answer]:
            for choice in part.choices:
                choices[choice.index] = choices.get(choice.index, "") + choice.text
        found.append([choices[i] for i in range(6)])
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=12)
    expected = [choice.text for output in llm.generate(texts, params) for choice in output.outputs]
    assert found == [expected, expected]
    server.wait_idle()


def test_best_of(client: openai.OpenAI, llm: LLM) -> None:
    answer = complete(client, temperature=1.0, seed=5, n=2, best_of=6)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=5, n=2, best_of=6, max_tokens=12))
    assert [choice.text for choice in answer.choices] == [choice.text for choice in output.outputs]


def test_special_tokens_in_a_prompt_are_parsed(client: openai.OpenAI) -> None:
    answer = complete(client, "a<|turn|>b", max_tokens=1, return_token_ids=True)
    assert answer.choices[0].prompt_token_ids[1] == 2
    assert answer.usage.prompt_tokens == 3


class TestEcho:
    def test_the_prompt_comes_back(self, client: openai.OpenAI) -> None:
        """CASES 2."""
        answer = complete(client, echo=True, max_tokens=0)
        assert answer.choices[0].text == PROMPT
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 0

    def test_the_prompt_comes_back_with_logprobs(self, client: openai.OpenAI) -> None:
        """CASES 2."""
        answer = complete(client, echo=True, max_tokens=0, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == PROMPT == "".join(logprobs.tokens)
        assert len(logprobs.token_logprobs) == answer.usage.prompt_tokens
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert answer.usage.completion_tokens == 0

    def test_one_entry_a_token(self, client: openai.OpenAI, llm: LLM) -> None:
        """CASES 25: prompt + 1 entries, the first null."""
        answer = complete(client, echo=True, logprobs=1, max_tokens=1)
        logprobs = answer.choices[0].logprobs
        count = answer.usage.prompt_tokens + 1
        for entries in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset):
            assert len(entries) == count
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1))
        positions = [*output.prompt_logprobs, *output.outputs[0].logprobs]
        expected = [None if entry is None else next(iter(entry.values())).logprob for entry in positions]
        assert logprobs.token_logprobs == expected
        assert all(len(top) in (1, 2) for top in logprobs.top_logprobs[1:])
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert top is None or top[token] == logprob

    @pytest.mark.parametrize("prompt", ["\nthe fox", "\n\n x", "café 😊 fox", "a<|turn|>b", " ", "日本"])
    @pytest.mark.parametrize("as_ids", [False, True])
    def test_joined_tokens_are_the_text(self, client: openai.OpenAI, llm: LLM, prompt: str, as_ids: bool) -> None:
        """CASES 26, and its whole kind: where a character takes several tokens, where a special one is spelled out."""
        given = llm.engine.tokenizer.encode(prompt) if as_ids else prompt
        answer = complete(
            client, given, echo=True, logprobs=0, max_tokens=6, ignore_eos=True, skip_special_tokens=False
        )
        choice = answer.choices[0]
        assert choice.text.startswith(prompt)
        assert "".join(choice.logprobs.tokens).rstrip("\ufffd") == choice.text.rstrip("\ufffd")
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text.startswith(token, offset)


class TestContext:
    def ids(self, count: int) -> list[int]:
        return [3 + i % 200 for i in range(count)]

    def test_a_prompt_as_long_as_the_context(self, client: openai.OpenAI) -> None:
        """CASES 3: refused with the true limit; scored with max_tokens 0."""
        with pytest.raises(openai.BadRequestError, match="the prompt has 256 tokens; the context holds 256"):
            complete(client, self.ids(256), max_tokens=1)
        scored = complete(client, self.ids(256), max_tokens=0, echo=True, logprobs=0)
        assert len(scored.choices[0].logprobs.tokens) == 256
        with pytest.raises(openai.BadRequestError, match="the prompt has 257 tokens"):
            complete(client, self.ids(257), max_tokens=0, echo=True)

    def test_more_than_the_context_is_cut(self, client: openai.OpenAI) -> None:
        answer = complete(client, self.ids(250), max_tokens=10_000, ignore_eos=True)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "length")

    def test_the_empty_prompt(self, client: openai.OpenAI) -> None:
        """CASES 1."""
        with pytest.raises(openai.BadRequestError, match="the prompt is empty and the tokeniser adds no token"):
            complete(client, "")
        assert complete(client).choices[0].text

    def test_a_refused_prompt_leaves_nothing_of_its_batch(self, client: openai.OpenAI, server: LiveServer) -> None:
        before = server.stats()["num_tokens"]
        with pytest.raises(openai.BadRequestError):
            complete(client, [PROMPT, ""])
        assert server.stats()["num_tokens"] == before


class TestSampling:
    def test_cold_temperatures_are_greedy(self, client: openai.OpenAI) -> None:
        """CASES 6."""
        greedy = complete(client).choices[0].text
        assert complete(client, temperature=1e-4).choices[0].text == greedy
        assert complete(client, temperature=1e-4, top_p=1e-4).choices[0].text == greedy

    def test_seeded_choices(self, client: openai.OpenAI) -> None:
        """CASES 14."""
        options: dict[str, Any] = {"n": 4, "seed": 7, "temperature": 1}
        first, second = (complete(client, **options) for _ in range(2))
        texts = [choice.text for choice in first.choices]
        assert texts == [choice.text for choice in second.choices]
        assert len(set(texts)) > 1

    def test_seeds_have_a_sign(self, client: openai.OpenAI) -> None:
        texts = {s: complete(client, temperature=1, seed=s).choices[0].text for s in (-1, 2**64 - 1, -(2**63), 0)}
        assert texts[-1] == texts[2**64 - 1]
        assert len(set(texts.values())) > 1

    def test_biases(self, client: openai.OpenAI) -> None:
        assert (
            complete(client, logit_bias={"40": 100}, max_tokens=4, return_token_ids=True).choices[0].token_ids
            == [40] * 4
        )

    def test_what_is_allowed_and_what_is_bad(self, client: openai.OpenAI, llm: LLM) -> None:
        """CASES 9: never outside of the allowed set; what leaves nothing is refused."""
        tokenizer = llm.engine.tokenizer
        (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
        answer = complete(client, allowed_token_ids=[a, b], bad_words=["a"], return_token_ids=True, max_tokens=8)
        assert answer.choices[0].token_ids == [b] * 8
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids: bad_words"):
            complete(client, allowed_token_ids=[a], bad_words=["a"])
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
            complete(client, allowed_token_ids=[])

    def test_padding_is_never_sampled(self, client: openai.OpenAI, llm: LLM) -> None:
        """CASES 11: the model has 384 rows, the tokeniser fewer ids."""
        size = llm.engine.tokenizer.vocab_size
        assert size < 384
        answer = complete(client, n=32, seed=1, temperature=5, ignore_eos=True, max_tokens=16, return_token_ids=True)
        assert max(token for choice in answer.choices for token in choice.token_ids) < size


class TestStopping:
    def greedy_ids(self, llm: LLM, count: int = 12) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return llm.generate(PROMPT, params)[0].outputs[0].token_ids

    def test_the_caller_s_own_stop_tokens(self, client: openai.OpenAI, llm: LLM) -> None:
        """CASES 16: also past ignored ends."""
        ids = self.greedy_ids(llm)
        answer = complete(client, stop_token_ids=[ids[3]], ignore_eos=True, return_token_ids=True)
        choice = answer.choices[0]
        assert choice.token_ids == ids[: ids.index(ids[3]) + 1]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[3])
        unstopped = complete(client, ignore_eos=True, max_tokens=40)
        assert unstopped.usage.completion_tokens == 40

    def test_no_end_before_the_minimum(self, client: openai.OpenAI, llm: LLM) -> None:
        """CASES 15, 17 (the ends of configs and tokeniser are one set: tests/engine)."""
        ids = self.greedy_ids(llm)
        answer = complete(client, stop_token_ids=[ids[0], ids[1]], min_tokens=5, return_token_ids=True)
        assert len(answer.choices[0].token_ids) >= 5
        assert not {ids[0], ids[1]} & set(answer.choices[0].token_ids[:5])

    def test_end_of_text(self, client: openai.OpenAI) -> None:
        answer = complete(client, logit_bias={"0": 100}, return_token_ids=True)
        choice = answer.choices[0]
        assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("", [0], "stop", None)
        shown = complete(client, logit_bias={"0": 100}, include_stop_str_in_output=True, skip_special_tokens=False)
        assert shown.choices[0].text == "<|end|>"


class TestCaching:
    PROMPT = "the quick brown fox jumps over the lazy dog and runs into the forest " * 2

    def test_cold_and_warm(self, client: openai.OpenAI) -> None:
        """CASES 28."""
        options: dict[str, Any] = {"logprobs": 3, "cache_salt": "cold and warm", "ignore_eos": True}
        cold, warm = (complete(client, self.PROMPT, **options) for _ in range(2))
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert warm.usage.prompt_tokens_details.cached_tokens >= 16
        assert warm.choices[0].text == cold.choices[0].text
        assert warm.choices[0].logprobs == cold.choices[0].logprobs

    def test_salts_keep_apart(self, client: openai.OpenAI) -> None:
        cached = [
            complete(client, self.PROMPT, cache_salt=salt).usage.prompt_tokens_details.cached_tokens
            for salt in ("a", "b", "a")
        ]
        assert cached[:2] == [0, 0]
        assert cached[2] > 0


def test_prompt_logprobs_by_id(client: openai.OpenAI, llm: LLM) -> None:
    answer = complete(client, prompt_logprobs=2, max_tokens=1)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    expected = [entry and {str(i): asdict(logprob) for i, logprob in entry.items()} for entry in output.prompt_logprobs]
    assert answer.choices[0].prompt_logprobs == expected


@pytest.fixture(scope="module")
def bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(make_llama(tmp_path_factory.mktemp("bos") / "bos", adds_bos=True)) as server:
        yield server


class TestBos:
    """A tokeniser that puts BOS before a prompt."""

    def test_the_empty_prompt_has_bos(self, bos: LiveServer) -> None:
        """CASES 1."""
        answer = complete(bos.client(), "", return_token_ids=True)
        assert answer.choices[0].prompt_token_ids == [1]
        assert answer.choices[0].text

    @pytest.mark.parametrize("prompt", ["\nfox", "the fox", "<|start|>the"])
    def test_echo_without_bos(self, bos: LiveServer, prompt: str) -> None:
        """CASES 26: the entry of a BOS that nobody wrote is there, its text is not."""
        answer = complete(bos.client(), prompt, echo=True, logprobs=1, max_tokens=1, return_token_ids=True)
        choice = answer.choices[0]
        assert choice.prompt_token_ids.count(1) == 1
        assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens + 1
        assert choice.logprobs.tokens[0] == "<|start|>"
        joined = "".join(choice.logprobs.tokens if prompt.startswith("<|start|>") else choice.logprobs.tokens[1:])
        assert joined == choice.text.rstrip("\ufffd")  # a character that the one token only began
        assert choice.text.startswith(prompt)
        assert choice.logprobs.text_offset[-1] == len(prompt)

    def test_tokenize(self, bos: LiveServer) -> None:
        """CASES 36."""
        tokens = bos.post("/tokenize", {"prompt": "the fox"}).json()["tokens"]
        assert (tokens[0], tokens.count(1)) == (1, 1)
        assert bos.post("/tokenize", {"prompt": "<|start|>the fox"}).json()["tokens"] == tokens
        assert bos.post("/tokenize", {"prompt": "the fox", "add_special_tokens": False}).json()["tokens"] == tokens[1:]
