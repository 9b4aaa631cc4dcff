"""A conversation through `openai` for JavaScript, from npm; the script is conversation.mjs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.engine.test_chat import ONE
from tests.server.live import LiveServer

PACKAGE = "openai@7.59.0"
SYSTEM = "says the book"
QUESTIONS = ["the quick brown fox", "a journey, été 🦊", "numbers such as 1 2 3"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="there is no node, or no npm"),
]


@pytest.fixture(scope="module")
def heard(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("npm")
    script = shutil.copy(Path(__file__).parent / "conversation.mjs", folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--cache", str(folder / "cache"), PACKAGE]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.dumps({"system": SYSTEM, "questions": QUESTIONS})
    command = ["node", script, server.url, told]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def replies(llm: LLM) -> list[str]:
    turns = [{"role": "system", "content": SYSTEM}]
    replies: list[str] = []
    for question in QUESTIONS:
        turns.append({"role": "user", "content": question})
        replies.append(llm.chat(turns, GREEDY)[0].outputs[0].text)
        turns.append({"role": "assistant", "content": replies[-1]})
    return replies


@pytest.mark.parametrize("way", ["whole", "streamed", "helped"])
def test_a_conversation(heard: Any, replies: list[str], way: str) -> None:
    assert heard[way] == replies


def test_two_at_once(heard: Any, replies: list[str]) -> None:
    assert heard["together"] == [replies, replies]


def test_models_and_usage(heard: Any, llm: LLM) -> None:
    assert heard["models"] == ["tiny", "alias"]
    (output,) = llm.chat(ONE, GREEDY)
    sizes = (len(output.prompt_token_ids), len(output.outputs[0].token_ids))
    assert (heard["usage"]["prompt_tokens"], heard["usage"]["completion_tokens"]) == sizes


def test_logprobs(heard: Any, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=2)
    (chat,) = llm.chat(ONE, params)
    entries = heard["chat"]["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [chosen(entry) for entry in chat.outputs[0].logprobs or []]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    (completion,) = llm.generate(["the quick brown fox"], params)
    choice = heard["completion"]["choices"][0]
    assert choice["text"] == "the quick brown fox" + completion.outputs[0].text
    entries = [*(completion.prompt_logprobs or []), *(completion.outputs[0].logprobs or [])]
    assert choice["logprobs"]["token_logprobs"] == [None if entry is None else chosen(entry) for entry in entries]


def chosen(entry: Any) -> float:
    """The logprob of the token that stands there, which comes first."""
    value: float = next(iter(entry.values())).logprob
    return value


def test_refusals(heard: Any) -> None:
    assert {**heard["refused"], "message": ...} == {
        "kind": "BadRequestError",
        "status": 400,
        "type": "invalid_request_error",
        "param": "top_p",
        "code": None,
        "message": ...,
    }
    assert "top_p=7" in heard["refused"]["message"]
    assert (heard["unknown"]["kind"], heard["unknown"]["code"]) == ("NotFoundError", "model_not_found")


def test_leaving_a_stream(server: LiveServer, heard: Any) -> None:
    assert heard["left"] == "chat.completion.chunk"
    server.wait_idle()
