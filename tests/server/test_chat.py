"""`/v1/chat/completions` on a live server, held against `LLM.chat` on the same model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from tests.engine.test_chat import ONE, TEMPLATE, TWO, with_template
from tests.server.live import LiveServer
from tests.tiny import make_llama

GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 12}


def chat(client: openai.OpenAI, messages: Any = ONE, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **{**GREEDY, **options}, extra_body=extra)


def test_the_reply_is_that_of_chat(client: openai.OpenAI, llm: LLM) -> None:
    answer = chat(client, TWO, extra={"ignore_eos": True, "return_token_ids": True})
    (output,) = llm.chat(TWO, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", output.outputs[0].text)
    assert choice.token_ids == output.outputs[0].token_ids
    assert choice.prompt_token_ids == output.prompt_token_ids
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == 12
    assert answer.timings["num_preemptions"] == 0


def test_without_max_tokens_the_context_is_the_limit(client: openai.OpenAI) -> None:
    """CASES 5."""
    answer = client.chat.completions.create(model="tiny", messages=ONE, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_both_names_of_the_limit(client: openai.OpenAI) -> None:
    for options in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = client.chat.completions.create(
            model="tiny", messages=ONE, temperature=0, extra_body={"ignore_eos": True}, **options
        )
        assert answer.usage.completion_tokens == 3


def test_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, extra={"ignore_eos": True})
    (output,) = llm.chat(ONE, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3))
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    for token_id, position, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, content, strict=True):
        assert entry.logprob == position[token_id].logprob
        assert bytes(entry.bytes) == llm.engine.tokenizer.bytes_of([token_id], skip_special_tokens=False)
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (p.logprob for p in position.values() if p.rank <= 3), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == output.outputs[0].text
    plain = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)


def test_content_parts(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": ONE[0]["content"]}]}]
    assert chat(client, parts).choices[0].message.content == chat(client).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="'image_url': only text is supported"):
        chat(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}])


def test_template_options(client: openai.OpenAI, llm: LLM) -> None:
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    mood = {"chat_template_kwargs": {"mood": "glad"}}
    answer = chat(client, TWO[:2], extra={**open_end, **mood, "return_token_ids": True})
    (output,) = llm.chat(TWO[:2], SamplingParams(temperature=0, max_tokens=12), **open_end, **mood)
    assert answer.choices[0].prompt_token_ids == output.prompt_token_ids
    assert answer.choices[0].message.content == output.outputs[0].text
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        chat(client, TWO[:2], extra={"continue_final_message": True})


def test_the_template_s_own_refusal(client: openai.OpenAI) -> None:
    """CASES 36."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, [{"role": "critic", "content": "boo"}])
    assert caught.value.body["message"] == "no critics, please"
    assert chat(client).choices[0].message.content


def test_exactly_one_bos(tmp_path: Path) -> None:
    """CASES 36: the tokeniser adds BOS to plain prompts, and the template writes it too."""
    path = with_template(make_llama(tmp_path / "bos", adds_bos=True), "<|start|>" + TEMPLATE)
    with LiveServer(path) as server:
        answer = chat(server.client(), extra={"return_token_ids": True})
        assert answer.choices[0].prompt_token_ids.count(1) == 1
        assert answer.choices[0].prompt_token_ids[0] == 1
        tokenized = server.post("/tokenize", {"messages": ONE}).json()
        assert tokenized["tokens"] == answer.choices[0].prompt_token_ids


@pytest.mark.parametrize(("template", "message"), [
    ("{{ ''.__class__ }}", "is not safe in line 1 and was stopped"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "ran for more than 0.5 seconds"),
])  # fmt: skip
def test_hostile_templates(tiny_llama: Path, tmp_path: Path, template: str, message: str) -> None:
    """CASES 42: one request is refused; while the template runs, others are served."""
    path = tmp_path / "hostile"
    shutil.copytree(tiny_llama, path)
    with LiveServer(with_template(path, template)) as server:
        server.context.renderer._templates._sandbox.seconds = 0.5

        async def both() -> str:
            client = server.async_client()
            refused = asyncio.create_task(client.chat.completions.create(model="tiny", messages=ONE))  # type: ignore[arg-type]
            await asyncio.sleep(0.2)
            served = await client.completions.create(model="tiny", prompt="the fox", max_tokens=2)
            assert served.usage is not None
            with pytest.raises(openai.BadRequestError) as caught:
                await refused
            return str(caught.value)

        assert message in asyncio.run(both())


def test_a_model_without_a_template(tiny_llama: Path) -> None:
    with LiveServer(tiny_llama) as server, pytest.raises(openai.BadRequestError, match="has no chat template"):
        chat(server.client())


NOT_YET: dict[str, Any] = {
    "audio": {"voice": "x", "format": "wav"},
    "chat_template": "{{ messages }}",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "web_search_options": {},
}


@pytest.mark.parametrize("name", NOT_YET)
def test_what_comes_later_is_refused_by_name(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name}=.*: not supported; leave it out") as caught:
        chat(client, extra={name: NOT_YET[name]})
    assert caught.value.body["param"] == name


def test_what_asks_for_nothing_special_is_taken(client: openai.OpenAI) -> None:
    plain = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "audio": None,
        "user": "me", "store": False, "metadata": {}, "service_tier": "auto", "nobody_knows_this": [1],
    }  # fmt: skip
    assert chat(client, extra=plain).choices[0].message.content == chat(client).choices[0].message.content


def test_a_conversation_longer_than_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the context holds 256"):
        chat(client, [{"role": "user", "content": "x " * 600}])


class TestConversation:
    """What openai-python's examples do: turn by turn, with the earlier turns sent along."""

    QUESTIONS = ("the quick brown fox", "a journey", "numbers such as 1 2 3")

    def expected(self, llm: LLM) -> list[str]:
        turns: list[dict[str, str]] = [{"role": "system", "content": "says the book"}]
        replies = []
        for question in self.QUESTIONS:
            turns.append({"role": "user", "content": question})
            replies.append(llm.chat(turns, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text)
            turns.append({"role": "assistant", "content": replies[-1]})
        return replies

    @pytest.mark.parametrize("stream", [False, True])
    def test_sync(self, client: openai.OpenAI, llm: LLM, stream: bool) -> None:
        turns: list[dict[str, str]] = [{"role": "system", "content": "says the book"}]
        replies = []
        for question in self.QUESTIONS:
            turns.append({"role": "user", "content": question})
            if stream:
                chunks = chat(client, turns, stream=True)
                replies.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            else:
                replies.append(chat(client, turns).choices[0].message.content)
            turns.append({"role": "assistant", "content": replies[-1]})
        assert replies == self.expected(llm)

    def test_async(self, server: LiveServer, llm: LLM) -> None:
        """Three conversations at once, streamed."""

        async def converse(client: openai.AsyncOpenAI) -> list[str]:
            turns: list[Any] = [{"role": "system", "content": "says the book"}]
            replies = []
            for question in self.QUESTIONS:
                turns.append({"role": "user", "content": question})
                stream = await client.chat.completions.create(model="tiny", messages=turns, stream=True, **GREEDY)
                replies.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
                turns.append({"role": "assistant", "content": replies[-1]})
            return replies

        async def all_of_them() -> list[list[str]]:
            async with server.async_client() as client:
                return await asyncio.gather(*(converse(client) for _ in range(3)))

        assert asyncio.run(all_of_them()) == [self.expected(llm)] * 3

    def test_the_stream_helper(self, client: openai.OpenAI, llm: LLM) -> None:
        messages: Any = [{"role": "system", "content": "says the book"}, {"role": "user", "content": self.QUESTIONS[0]}]
        with client.chat.completions.stream(model="tiny", messages=messages, **GREEDY) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == self.expected(llm)[0]
