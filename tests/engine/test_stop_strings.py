"""Stop strings: wherever they are cut, and through the tokeniser, against a search of the whole text."""

from __future__ import annotations

import codecs
import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import LLM, LLMEngine, RequestOutput, SamplingParams
from octavo.engine.messages import Request, SequenceOutput, SequenceRequest
from octavo.engine.outputs import OutputProcessor
from octavo.engine.stop_strings import StopStrings
from octavo.outputs import RequestMetrics
from octavo.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import make_tokenizer


def first_stop(text: str, stops: list[str], counts: list[bool]) -> tuple[int, str] | None:
    """Reads character by character; `counts[i]` says whether a stop string may end with character i."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met and counts[end - 1]:
            return end, max(met, key=len)
    return None


few = st.text("ab", min_size=1, max_size=5)


class TestOnText:
    @settings(max_examples=500, deadline=None)
    @given(
        chunks=st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12),
        stops=st.lists(few, max_size=4),
        include=st.booleans(),
    )
    def test_equals_a_search_of_the_whole_text(self, chunks, stops, include) -> None:
        whole = "".join(chunk for chunk, _ in chunks)
        match = first_stop(whole, stops, [check for chunk, check in chunks for _ in chunk])
        finder, text, found = StopStrings(stops, include=include), "", None
        for chunk, check in chunks:
            shown, found = finder.feed(chunk, check=check)
            text += shown
            if found is not None:
                break
        if match is None:
            assert found is None
            assert text + finder.flush() == whole
        else:
            end, stop = match
            assert found == stop
            assert text == whole[: end if include else end - len(stop)]
        assert finder.flush() == ""

    @settings(max_examples=300, deadline=None)
    @given(text=st.text("abc", max_size=20), stops=st.lists(few, min_size=1, max_size=3))
    def test_what_is_held_may_still_become_a_stop_string_and_nothing_else_is(self, text, stops) -> None:
        finder, shown = StopStrings(stops), ""
        for i, char in enumerate(text):
            more, found = finder.feed(char)
            shown += more
            if found is not None:
                return
            held = text[len(shown) : i + 1]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
            for longer in range(len(held) + 1, i + 2):
                assert not any(stop.startswith(text[i + 1 - longer : i + 1]) for stop in stops)

    def test_by_example(self) -> None:
        finder = StopStrings(["END", "EN?"])
        assert [finder.feed(chunk) for chunk in ("a lon", "g EN", "V", " EN")] == [
            ("a lon", None), ("g ", None), ("ENV", None), (" ", None),
        ]  # fmt: skip
        assert finder.feed("Done") == ("", "END")

    def test_hostile_stop_strings_cost_a_few_operations_a_character(self) -> None:
        """16 of the longest, which the text nearly meets all the time, beside ones that it never begins."""

        def seconds(stops: list[str]) -> float:
            finder, start = StopStrings(stops), time.process_time()
            for _ in range(1000):
                assert finder.feed("aaaa")[1] is None
            return time.process_time() - start

        hostile = ["a" * (500 + i) + "b" + "a" * 500 for i in range(15)]
        assert seconds(["a" * 1023 + "b", *hostile]) < 100 * seconds(["b"])

    def test_no_stop_strings_hold_nothing_back(self) -> None:
        assert StopStrings(()).feed("abc") == ("abc", None)

    def test_a_match_that_does_not_count_may_overlap_one_that_does(self) -> None:
        finder = StopStrings(["aa"])
        assert finder.feed("xaa", check=False) == ("xa", None)
        assert finder.feed("ab", check=True) == ("", "aa")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, adds_bos=False)
    return load_tokenizer(directory, {}, {}, {})


def stream(tokenizer: Tokenizer, tokens: list[int], last: str, params: SamplingParams) -> tuple[RequestOutput, list]:
    """What the caller sees after each token; the core is played by this loop."""
    processor = OutputProcessor(tokenizer)
    sequence = SequenceRequest(0, [40], params, 0, 500, frozenset(), 0, 0.0)
    processor.add("x", None, Request(params, [sequence]))
    seen = []
    for i, token in enumerate(tokens):
        update = SequenceOutput(0, token)
        if i == len(tokens) - 1:
            update.finish_reason, update.metrics = last, RequestMetrics()
        (output,), stopped = processor.process([update])
        if stopped:
            assert stopped == [0]
            processor.process([SequenceOutput(0, finish_reason="stop", metrics=RequestMetrics())])
        seen.append(output.outputs[0].text)
        if output.finished:
            break
    return output, seen


def expected(tokenizer: Tokenizer, tokens: list[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string, from the whole text and the tokens that each character takes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole, certain = "", []
    for k, token in enumerate(tokens, 1):
        whole += decoder.decode(tokenizer.bytes_of([token]), final=k == len(tokens))
        certain.append(len(whole))
    token_of = [next(k for k, count in enumerate(certain, 1) if count > i) for i in range(len(whole))]
    match = first_stop(whole, list(params.stop), [number > params.min_tokens for number in token_of])
    if match is None:
        return whole, len(tokens), None
    end, stop = match
    kept = end if params.include_stop_str_in_output else end - len(stop)
    return whole[:kept], token_of[end - 1], stop


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_streams_of_tokens_equal_a_search_of_the_whole_text(tokenizer, data) -> None:
    """Random tokens, most of them parts of characters or of words, and stop strings cut from their own text."""
    some = st.sampled_from([*range(3, 320), *tokenizer.encode("the fox é 😊 漢字 the fox é 😊 漢字")])
    tokens = data.draw(st.lists(some, min_size=1, max_size=20))
    text = tokenizer.decode(tokens)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[start : start + data.draw(st.integers(1, 6))] or "zz")
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 4)),
        max_tokens=None,
    )
    output, seen = stream(tokenizer, tokens, "length", params)
    whole, count, stop = expected(tokenizer, tokens, params)
    completion = output.outputs[0]
    assert output.finished
    assert (completion.text, completion.stop_reason) == (whole, stop)
    assert completion.token_ids == tokens[:count]
    assert completion.finish_reason == ("length" if stop is None else "stop")
    for before, after in itertools.pairwise(seen):
        assert after.startswith(before)  # what was shown is never taken back
    assert seen[-1] == whole


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["fox", " fo", "k brown f", "jumps", "é😊", "x é"])
def test_every_split_of_a_stop_string(tokenizer: Tokenizer, stop: str, include: bool) -> None:
    """Every way to cut the text around it into pieces that are tokenised on their own."""
    text = "quick brown fox é😊 jumps over"
    at = text.index(stop)
    first, last = max(0, at - 2), min(len(text), at + len(stop) + 2)
    for cuts in range(2 ** (last - first)):
        pieces = [text[:first]]
        for i in range(first, last):
            if cuts >> (i - first) & 1:
                pieces.append("")
            pieces[-1] += text[i]
        pieces.append(text[last:])
        tokens = [token for piece in pieces for token in tokenizer.encode(piece)]
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        output, seen = stream(tokenizer, tokens, "length", params)
        assert output.outputs[0].text == text[: at + len(stop) * include]
        assert output.outputs[0].stop_reason == stop
        assert all(text[:at].startswith(shown) for shown in seen[:-1])


class TestEnds:
    def test_held_text_is_flushed_at_max_tokens(self, tokenizer: Tokenizer) -> None:
        """CASES 21."""
        output, seen = stream(tokenizer, tokenizer.encode("the fo"), "length", SamplingParams(stop="fox"))
        assert output.outputs[0].text == "the fo" == seen[-1]
        assert output.outputs[0].finish_reason == "length"
        assert "f" not in seen[-2]

    @pytest.mark.parametrize("reason", ["stop", "abort", "error"])
    def test_held_text_is_flushed_at_any_other_end(self, tokenizer: Tokenizer, reason: str) -> None:
        processor = OutputProcessor(tokenizer)
        params = SamplingParams(stop="fox")
        processor.add("x", None, Request(params, [SequenceRequest(0, [40], params, 0, 99, frozenset({0}), 0, 0.0)]))
        for token in tokenizer.encode("the fo"):
            processor.process([SequenceOutput(0, token)])
        last = 0 if reason == "stop" else None
        (output,), stopped = processor.process(
            [SequenceOutput(0, last, finish_reason=reason, metrics=RequestMetrics())]
        )
        assert output.outputs[0].text == "the fo"
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (reason, None)
        assert (output.finished, stopped) == (True, [])

    def test_the_last_token_that_may_be_can_still_stop_it(self, tokenizer: Tokenizer) -> None:
        output, _ = stream(tokenizer, tokenizer.encode("the fox"), "length", SamplingParams(stop="fox"))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("the ", "stop")

    @pytest.mark.parametrize(("include", "text"), [(False, "the fo"), (True, "the fox")])
    def test_text_of_a_stop_token(self, tokenizer: Tokenizer, include: bool, text: str) -> None:
        tokens = [*tokenizer.encode("the fo"), *tokenizer.encode("x")]
        params = SamplingParams(stop_token_ids=[tokens[-1]], include_stop_str_in_output=include)
        output, _ = stream(tokenizer, tokens, "stop", params)
        assert output.outputs[0].text == text
        assert output.outputs[0].stop_reason == tokens[-1]
        assert output.outputs[0].token_ids == tokens


@pytest.fixture(scope="module")
def llm(tiny_llama: Path):
    with LLM(str(tiny_llama), num_kv_blocks=256, num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_model_each_part_of_its_text_stops_it(llm: LLM, temperature: float) -> None:
    """CASES 19: batched together, and alone step by step; with the same tokens up to the stop."""
    free = SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)
    whole = llm.generate("the quick", free)[0].outputs[0]
    stops = sorted({whole.text[i : i + n] for i in range(len(whole.text)) for n in (1, 2, 5)})
    params = [
        SamplingParams(
            temperature=temperature, seed=3, max_tokens=16, ignore_eos=True, stop=[stop, "never ever"],
            include_stop_str_in_output=i % 2 == 1, min_tokens=i % 3,
        )
        for i, stop in enumerate(stops)
    ]  # fmt: skip
    for own, output in zip(params, llm.generate(["the quick"] * len(stops), params), strict=True):
        text, count, stop = expected(llm.engine.tokenizer, whole.token_ids, own)
        completion = output.outputs[0]
        assert (completion.text, completion.stop_reason) == (text, stop)
        assert completion.token_ids == whole.token_ids[:count]
        assert completion.finish_reason == ("length" if stop is None else "stop")
    assert llm.stats()["num_used_blocks"] == 0
    for own in params[:: len(params) // 8]:
        assert_streamed(llm.engine, own, expected(llm.engine.tokenizer, whole.token_ids, own)[0])


def assert_streamed(engine: LLMEngine, params: SamplingParams, text: str) -> None:
    engine.add_request("x", "the quick", params)
    shown = ""
    while engine.has_unfinished_requests:
        (output,) = engine.step()
        assert output.outputs[0].text.startswith(shown)
        shown = output.outputs[0].text
    assert output.finished  # in the very step that completed the stop string: nothing is left to run
    assert shown == text
