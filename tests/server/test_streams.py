"""A stream says the same as an answer in one piece: text, logprobs, token ids, reasons, usage."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.server import streaming
from tests.engine.failing_engine import faulty
from tests.engine.test_chat import ONE
from tests.server.live import LiveServer
from tests.tiny import make_llama

WORDS = ["the", " fox", "a", " ", "e", "qu", "\ufffd", "number", "😊"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream, as bytes on the wire: each is whole UTF-8 and JSON by itself, and the last says that it is."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(part.removeprefix(b"data: ").decode()) for part in parts]


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, put together as a client would."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "token_ids": []})
            assert choice.get("finish_reason") is None, "a choice went on after its end"
            text = part.get("text") or part.get("delta", {}).get("content") or ""
            assert text or part["finish_reason"], f"an empty delta: {part}"
            if "delta" in part:
                assert ("role" in part["delta"]) == ("role" not in choice)
                choice["role"] = "assistant"
                assert part["delta"].get("content") != ""
            choice["text"] += text
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
            if part["logprobs"] is not None:
                before = choice["logprobs"] or {}
                choice["logprobs"] = {
                    name: before.get(name, []) + entries
                    for name, entries in part["logprobs"].items()
                    if entries is not None
                }
    return [choices[i] for i in sorted(choices)]


def whole(body: dict[str, Any]) -> list[dict[str, Any]]:
    choices = []
    for part in body["choices"]:
        logprobs = part["logprobs"]
        choices.append(
            {
                "text": part["text"] if "text" in part else part["message"]["content"],
                "token_ids": part.get("token_ids", []),
                "finish_reason": part["finish_reason"],
                "stop_reason": part["stop_reason"],
                "logprobs": logprobs and {name: entries for name, entries in logprobs.items() if entries is not None},
                **({"role": "assistant"} if "message" in part else {}),
            }
        )
    return choices


PARAMETERS = st.fixed_dictionaries(
    {"seed": st.integers(0, 99), "max_tokens": st.integers(1, 20)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1, 3]),
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(1),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "stop_token_ids": st.lists(st.integers(3, 319), max_size=40),
        "logit_bias": st.dictionaries(st.integers(0, 200).map(str), st.integers(1, 8), max_size=40),
        "return_token_ids": st.booleans(),
        "top_k": st.integers(1, 50),
    },
)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same_in_both(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    stream = events(server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    *chunks, last = stream
    assert joined(chunks) == whole(answer.json())
    assert last["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == answer.json()["usage"][key]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in stream}) == 1


@QUICK
@given(
    parameters=PARAMETERS,
    prompts=st.one_of(
        st.sampled_from(["the fox", "\n", "日本 😊"]), st.just(["a", "the quick"]), st.just([[5, 250, 9], [3]])
    ),
    logprobs=st.sampled_from([None, 0, 3]),
    echo=st.booleans(),
)
def test_completions(
    server: LiveServer, parameters: dict[str, Any], prompts: Any, logprobs: int | None, echo: bool
) -> None:
    same_in_both(server, "/v1/completions", {**parameters, "prompt": prompts, "logprobs": logprobs, "echo": echo})


@QUICK
@given(parameters=PARAMETERS, top=st.sampled_from([None, 0, 3]))
def test_chat(server: LiveServer, parameters: dict[str, Any], top: int | None) -> None:
    logprobs = {} if top is None else {"logprobs": True, "top_logprobs": top}
    same_in_both(server, "/v1/chat/completions", {**parameters, **logprobs, "messages": ONE})


def test_an_echo_alone(server: LiveServer) -> None:
    same_in_both(server, "/v1/completions", {"prompt": "the fox", "max_tokens": 0, "echo": True, "logprobs": 1})


@pytest.fixture(scope="module")
def slow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its steps take 0.1 s."""
    with LiveServer(faulty(model, tmp_path_factory.mktemp("slow") / "model", step_seconds=0.1)) as server:
        yield server


def test_deltas_come_as_they_are_made(slow: LiveServer) -> None:
    """One with each step, when that is done."""
    body = {"prompt": "the fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = slow.post("/v1/completions", body).json()["choices"][0]
    chunks, times = [], []
    with httpx.stream("POST", slow.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                times.append(time.monotonic())
    assert len(chunks) >= 8  # some tokens are parts of characters
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    counts = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(counts) == 12
    for (before, after), count in zip(pairwise(times), counts[1:], strict=True):
        assert after - before > 0.07 * count
    assert "timings" in chunks[-1]
    assert not [chunk for chunk in chunks[:-1] if "timings" in chunk]


def test_a_silent_stream_is_heard_of(slow: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By comments, while nothing else is sent; openai's client skips them."""
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.02)
    body = {"prompt": "the fox", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True}
    answer = slow.post("/v1/completions", body)
    parts = answer.content.split(b"\n\n")
    assert (parts[-2:], parts.count(b": ping")) == ([b"data: [DONE]", b""], pytest.approx(20, abs=12))
    for part in parts[:-2]:
        assert part == b": ping" or json.loads(part.removeprefix(b"data: "))["choices"]
    text = slow.post("/v1/completions", {**body, "stream": False}).json()["choices"][0]["text"]
    client = slow.client()
    said = client.completions.create(
        model="tiny", prompt="the fox", max_tokens=5, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in said) == text
    monkeypatch.setattr(streaming, "PING_SECONDS", 1.0)
    assert b"ping" not in slow.post("/v1/completions", body).content


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_cut_off_says_so(slow: LiveServer, stream: bool) -> None:
    """`abort`, as vLLM says; openai's client, whose types do not know it, hands it on."""

    async def cut() -> None:
        engine = slow.context.engine
        async with asyncio.timeout(20):
            while engine._dispatcher.outputs.num_generated_tokens < goal:
                await asyncio.sleep(0.01)
        for name in engine._dispatcher.ledger.request_ids():
            engine._dispatcher.abort(name)

    goal = slow.context.engine._dispatcher.outputs.num_generated_tokens + 4
    cutting = asyncio.run_coroutine_threadsafe(cut(), slow._loop)
    said = slow.client().completions.create(
        model="tiny", prompt="the fox", max_tokens=100, stream=stream, extra_body={"ignore_eos": True}
    )
    choices = [chunk.choices[0] for chunk in said] if stream else [said.choices[0]]
    assert choices[-1].finish_reason == "abort"
    assert "".join(choice.text for choice in choices)
    cutting.result(20)


def test_no_part_of_a_stop_string_is_sent(server: LiveServer, llm: Any) -> None:
    """CASES 19: one that is spread over several tokens; and 21: what only begins like it is sent in the end."""
    (output,) = llm.generate("the fox", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    text = output.outputs[0].text
    stop = text[5:12]
    body = {"prompt": "the fox", "temperature": 0, "max_tokens": 16, "ignore_eos": True, "stream": True}
    sent = "".join(
        chunk["choices"][0]["text"] for chunk in events(server.post("/v1/completions", {**body, "stop": stop}))
    )
    assert sent == text[: text.index(stop)]
    held = text[-3:] + "never"
    sent = "".join(
        chunk["choices"][0]["text"] for chunk in events(server.post("/v1/completions", {**body, "stop": held}))
    )
    assert sent == text


def test_characters_that_take_several_tokens(tmp_path: Path) -> None:
    """CASES 22: a reply of an emoji and rare characters: every chunk is whole, none has a replacement character, and
    joined they are the answer in one piece.

    All logits of this model are nearly 0, so that the biases make the reply: its nine tokens in order, and again, since
    each time the penalty puts a token behind all others.
    """
    text = "😊é龜"
    with LiveServer(make_llama(tmp_path / "flat", initializer_range=1e-6)) as flat:
        ids = flat.post("/tokenize", {"prompt": text}).json()["tokens"]
        assert len(set(ids)) == len(text.encode()) == 9
        biases = {str(token): 100 - 0.2 * i for i, token in enumerate(ids)}
        body = {"prompt": "say: ", "max_tokens": 27, "temperature": 0, "logit_bias": biases, "frequency_penalty": 2}
        for logprobs in (None, 0):
            same_in_both(flat, "/v1/completions", {**body, "logprobs": logprobs})
        chunks = events(flat.post("/v1/completions", {**body, "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text * 3
        cut = flat.post("/v1/completions", {**body, "max_tokens": 3, "logprobs": 0}).json()["choices"][0]
        assert (cut["text"], cut["logprobs"]["tokens"]) == ("\ufffd", ["", "", ""])


@pytest.mark.parametrize(("options", "expected"), [
    ({}, False), ({"stream_options": None}, False), ({"stream_options": {}}, False),
    ({"stream_options": {"include_usage": False}}, False), ({"stream_options": {"include_usage": True}}, True),
])  # fmt: skip
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_usage_chunk(server: LiveServer, path: str, options: dict[str, Any], expected: bool) -> None:
    """CASES 23."""
    body = {"prompt": "the fox"} if path == "completions" else {"messages": ONE}
    body |= {"max_tokens": 4, "ignore_eos": True, "stream": True}
    chunks = events(server.post(f"/v1/{path}", {**body, **options}))
    usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
    assert usage == (chunks[-1:] if expected else [])
    assert [chunk for chunk in chunks if chunk["choices"] == []] == usage
    if expected:
        assert usage[0]["usage"]["completion_tokens"] == 4
        assert usage[0]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
