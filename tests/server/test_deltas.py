"""Cutting cumulative outputs into deltas, and telling logprobs, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.server.logprobs import CompletionLogprobs, chat_logprobs
from octavo.server.streaming import Deltas, merge, while_connected
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import open_checkpoint


@given(st.data())
def test_deltas_joined_are_the_choices(data: st.DataObject) -> None:
    """However the steps fall, in text and in tokens, and however many of them lie between two looks."""
    deltas = Deltas()
    output = RequestOutput(
        "r", None, [1], [CompletionOutput(i, logprobs=[]) for i in range(data.draw(st.integers(1, 3)))]
    )
    seen: dict[int, list[Any]] = {choice.index: [] for choice in output.outputs}
    while True:
        for choice in output.outputs:
            if choice.finish_reason is not None:
                continue
            grown = data.draw(st.integers(0, 3))
            choice.token_ids += [7] * grown
            assert choice.logprobs is not None
            choice.logprobs += [{7: Logprob(-1.0, 1, "x")}] * grown
            choice.text += data.draw(st.text(max_size=3))
            choice.finish_reason = data.draw(st.sampled_from(["stop", "length", None, None, None]))
        output.finished = all(choice.finish_reason is not None for choice in output.outputs)
        if output.finished or data.draw(st.booleans()):
            for delta in deltas.take(0, output):
                seen[delta.index].append(delta)
        if output.finished:
            break
    assert list(deltas.take(0, output)) == []
    for choice in output.outputs:
        parts = seen[choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [i for part in parts for i in part.token_ids] == choice.token_ids
        assert [entry for part in parts for entry in part.logprobs] == choice.logprobs
        assert [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert all(part.text for part in parts[:-1])


def test_deltas_of_several_prompts_are_numbered_through() -> None:
    deltas = Deltas()
    for prompt in range(3):
        output = RequestOutput("r", None, [1], [CompletionOutput(i, text="x", finish_reason="stop") for i in range(2)])
        assert [delta.index for delta in deltas.take(prompt, output)] == [2 * prompt, 2 * prompt + 1]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    checkpoint = open_checkpoint(tiny_llama)
    return load_tokenizer(checkpoint.path, checkpoint.metadata, checkpoint.config, checkpoint.generation_config)


class TestLogprobs:
    """The forms, on tokens that are whole characters, parts of one, and special."""

    def entries(self, ids: list[int]) -> list[dict[int, Logprob]]:
        """At each place the token that stands there, of rank 3, and two others."""
        return [{i: Logprob(-3.0, 3, ""), 250: Logprob(-1.0, 1, ""), 0: Logprob(-2.0, 2, "")} for i in ids]

    def test_completions(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("é<|turn|>x")
        assert len(ids) == 4
        output = RequestOutput("r", None, [5], [])
        lists = CompletionLogprobs(tokenizer, 2, output, echo=None, hides=True).take(ids, self.entries(ids))
        assert lists["tokens"] == ["", "é", "<|turn|>", "x"]
        assert lists["text_offset"] == [0, 0, 1, 1]
        assert lists["token_logprobs"] == [-3.0] * 4
        key = tokenizer.bytes_of([250])
        assert lists["top_logprobs"][3] == {_as_key(key): -1.0, "<|end|>": -2.0, "x": -3.0}
        for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True):
            assert top[token] == -3.0
        fewer = CompletionLogprobs(tokenizer, 0, output, echo=None, hides=False).take(ids, self.entries(ids))
        assert fewer["top_logprobs"] == [{"": -3.0}, {"é": -3.0}, {"<|turn|>": -3.0}, {"x": -3.0}]
        assert fewer["text_offset"] == [0, 0, 1, 9]

    def test_chats(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("é x")
        content = chat_logprobs(tokenizer, self.entries(ids), 1)["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "é x"
        assert [entry["token"] for entry in content][:2] == ["\ufffd", "\ufffd"]
        assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(ids)
        assert content[0]["top_logprobs"][0]["logprob"] == -1.0

    def test_what_json_lacks(self, tokenizer: Tokenizer) -> None:
        entry = {5: Logprob(-float("inf"), 9, "")}
        assert chat_logprobs(tokenizer, [entry], 0)["content"][0]["logprob"] == -9999.0
        lists = CompletionLogprobs(tokenizer, 1, RequestOutput("r", None, [5], []), echo=None, hides=True).take(
            [5], [entry]
        )
        assert lists["token_logprobs"] == [-9999.0]


def _as_key(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TestMerge:
    @pytest.mark.parametrize("counts", [[3], [0], [2, 0, 5], [1, 1]])
    def test_every_item_of_every_stream_in_order(self, counts: list[int]) -> None:

        async def stream(count: int) -> Any:
            for i in range(count):
                await asyncio.sleep(0)
                yield i

        async def main() -> list[Any]:
            return [item async for item in merge([stream(count) for count in counts])]

        found = asyncio.run(main())
        for index, count in enumerate(counts):
            assert [item for i, item in found if i == index] == list(range(count))
        assert len(found) == sum(counts)

    def test_nothing_is_read_ahead(self) -> None:

        read = []

        async def stream(name: int) -> Any:
            for i in range(100):
                read.append((name, i))
                yield i
                await asyncio.sleep(0)

        async def main() -> None:
            merged = merge([stream(0), stream(1)])
            await anext(merged)
            await asyncio.sleep(0.01)
            assert len(read) <= 4
            await merged.aclose()

        asyncio.run(main())

    def test_errors_come_through(self) -> None:

        async def broken() -> Any:
            yield 1
            raise ValueError("broken")

        async def endless() -> Any:
            yield 1
            await asyncio.sleep(60)

        async def main() -> None:
            with pytest.raises(ValueError, match="broken"):
                [_ async for _ in merge([broken(), endless()])]

        asyncio.run(main())


def test_work_that_fails_while_connected() -> None:

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def work() -> int:
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await while_connected(receive, work())  # type: ignore[arg-type]

    asyncio.run(main())
