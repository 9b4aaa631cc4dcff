"""Whatever goes wrong comes in OpenAI's shape, names field, value and limit, and leaves the server as it was."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from octavo.engine.streams import RequestStream
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.bodies import MAX_BODY_BYTES
from tests.engine.test_chat import ONE
from tests.server.live import LiveServer
from tests.tiny import make_llama


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(("field", "value", "message"), [
    ("top_k", 0.4, "top_k=0.4: expected a whole number between -1 and 2147483647"),  # CASES 7
    ("top_k", "5", "top_k='5': expected a whole number between -1 and 2147483647"),
    ("n", 1000000, "n=1000000: must be between 1 and 128"),  # CASES 12
    ("n", 0, "n=0: must be between 1 and 128"),
    ("n", True, "n=True: expected a whole number between 1 and 128"),
    ("best_of", 200, "best_of=200: must be between 1 and 128"),
    ("temperature", -1, "temperature=-1: must be a finite number at least 0"),
    ("temperature", "hot", "temperature='hot': expected a number at least 0"),
    ("top_p", 0, "top_p=0: must be above 0 and at most 1"),
    ("top_p", 1.5, "top_p=1.5: must be a finite number between 0 and 1"),
    ("presence_penalty", 3, "presence_penalty=3: must be a finite number between -2 and 2"),
    ("logit_bias", {"100000": 1}, "logit_bias: 100000 is not a token id; the model's are 0 to 3"),  # CASES 8
    ("logit_bias", {str(i): 1 for i in range(301)}, "logit_bias: 301 token ids; at most 300 may be given"),
    ("logit_bias", {"x": 1}, "logit_bias='x': the keys are token ids, such as '42'"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias='9999"),
    ("logit_bias", {"5": 101}, "logit_bias[5]=101: must be a finite number between -100 and 100"),
    ("logit_bias", [5], "logit_bias=[5]: expected a mapping from token ids to numbers"),
    ("stop", "", "stop='': expected a string of 1 to 1024 characters"),
    ("stop", [1], "stop=1: expected a string of 1 to 1024 characters"),
    ("stop", ["x"] * 17, "stop: 17 strings; at most 16 are allowed"),
    ("stop_token_ids", [-1], "stop_token_ids=-1: must be at least 0"),
    ("stop_token_ids", [10**9], "stop_token_ids: 1000000000 is not a token id"),
    ("allowed_token_ids", [], "allowed_token_ids=(): nothing could be sampled"),
    ("seed", 2**64, "seed=18446744073709551616: must be between 0 and 18446744073709551615"),
    ("seed", 1.5, "seed=1.5: expected a whole number"),
    ("max_tokens", -1, "max_tokens=-1: must be at least 0"),
    ("max_tokens", 1.5, "max_tokens=1.5: expected a whole number"),
    ("min_tokens", 99, "min_tokens=99: must be at most max_tokens"),
    ("prompt_logprobs", 21, "prompt_logprobs=21: input should be less than or equal to 20"),
    ("stream", "yes", "stream='yes': input should be a valid boolean"),
    ("stream_options", 5, "stream_options=5: "),
    ("stream_options", {"include_usage": 1}, "stream_options: include_usage=1: expected true or false"),
    ("stream_options", {"include_usage": True}, "stream_options is for streams: set stream to true"),
    ("priority", "high", "priority='high': input should be a valid integer"),
    ("priority", 2**31, "priority=2147483648: input should be less than 2147483648"),
    ("max_tokens", 10**30, "max_tokens="),
    ("cache_salt", "", "cache_salt='': expected text of 1 to 1024 characters"),
    ("ignore_eos", 1, "ignore_eos=1: expected true or false"),
    ("use_beam_search", True, "use_beam_search=True: not supported; leave it out"),
    ("guided_json", {}, "guided_json={}: not supported; leave it out"),
])  # fmt: skip
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_refused_values(server: LiveServer, path: str, field: str, value: Any, message: str) -> None:
    own = {"prompt": "the fox"} if path == "completions" else {"messages": ONE, "max_tokens": 16}
    before = server.stats()["num_tokens"]
    error = error_of(server.post(f"/v1/{path}", {**own, field: value}), 400)
    assert message in error["message"]
    assert error["param"] == field
    assert server.stats()["num_tokens"] == before
    assert server.post(f"/v1/{path}", own).status_code == 200


@pytest.mark.parametrize(("body", "message", "param"), [
    ({}, "prompt is missing", "prompt"),
    ({"prompt": []}, "prompt=[]: give at least one prompt", "prompt"),
    ({"prompt": [[]]}, "the prompt is empty", None),
    ({"prompt": 5}, "prompt=5: expected text", "prompt"),
    ({"prompt": None}, "prompt=None: expected text", "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]=5: expected text", "prompt"),
    ({"prompt": [5, "a"]}, "prompt[0]=5: expected text", "prompt"),
    ({"prompt": [1.5]}, "prompt[0]=1.5: expected text", "prompt"),
    ({"prompt": [[5, "a"]]}, "prompt_token_ids: 'a' is not a token id", None),
    ({"prompt": [99999]}, "prompt_token_ids: 99999 is not a token id; the model's are 0 to 383", None),
    ({"prompt": [-1]}, "prompt_token_ids: -1 is not a token id", None),
    ({"prompt": "a", "suffix": "b"}, "suffix='b': not supported; leave it out", "suffix"),
    ({"prompt": "a", "logprobs": 21}, "logprobs=21: input should be less than or equal to 20", "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs=True: input should be a valid integer", "logprobs"),
    ({"prompt": "a", "echo": 1}, "echo=1: input should be a valid boolean", "echo"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "best_of=3: which choices are the best", "best_of"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs=1: not in a stream", "prompt_logprobs"),
])  # fmt: skip
def test_refused_completions(server: LiveServer, body: dict[str, Any], message: str, param: str | None) -> None:
    error = error_of(server.post("/v1/completions", body), 400)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(("body", "message", "param"), [
    ({"prompt": ["a", "b", ""]}, "prompt[2]: the prompt is empty", "prompt"),
    ({"prompt": ["a", "b " * 300]}, "prompt[1]: the prompt has ", "prompt"),
    ({"prompt": [[5], [6, 99999]]}, "prompt[1]: prompt_token_ids: 99999 is not a token id", "prompt"),
    ({"prompt": ["a", "b"], "cache_salt": ""}, "cache_salt='': expected text", "cache_salt"),
    ({"prompt": ["a", "b"], "logit_bias": {"999": 1}}, "logit_bias: 999 is not a token id", "logit_bias"),
    ({"prompt": ["a", "b"], "stop_token_ids": [999]}, "stop_token_ids: 999 is not a token id", "stop_token_ids"),
])  # fmt: skip
def test_which_prompt_of_a_batch_is_refused(server: LiveServer, body: dict[str, Any], message: str, param: str) -> None:
    """By its index; what is wrong for all of them names none."""
    error = error_of(server.post("/v1/completions", body), 400)
    assert message in error["message"]
    assert ("prompt[" in error["message"]) == (param in ("prompt", "cache_salt"))
    assert error["param"] == param


def test_errors_have_ids_too(server: LiveServer, client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    """Each one its own, which the log has with what was wrong."""
    caplog.set_level("INFO", "octavo")
    answers = [
        server.post("/v1/completions", {"prompt": ""}),
        server.post("/v1/completions", {"prompt": "a", "n": 0}),
        server.post("/v1/completions", b"{"),
        server.get("/nowhere"),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    assert all(name in caplog.text for name in ids)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="")
    assert refused.value.request_id is not None


@pytest.mark.parametrize(("body", "message"), [
    ({}, "messages is missing"),
    ({"messages": []}, "the conversation is empty"),
    ({"messages": "hi"}, "messages='hi': expected a list of messages"),
    ({"messages": ["hi"]}, "message 0 is 'hi': expected an object"),
    ({"messages": [{"role": "user"}]}, "message 0 (user) has no content"),
    ({"messages": ONE, "top_logprobs": 2}, "top_logprobs=2: set logprobs to true too"),
    ({"messages": ONE, "logprobs": True, "top_logprobs": 21}, "top_logprobs=21: input should be less"),
    ({"messages": ONE, "logprobs": 3}, "logprobs=3: input should be a valid boolean"),
    ({"messages": ONE, "max_completion_tokens": -1}, "max_completion_tokens=-1: input should be greater"),
    ({"messages": ONE, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs must not hold 'messages'"),
    ({"messages": ONE, "chat_template_kwargs": 5}, "chat_template_kwargs=5: expected an object"),
])  # fmt: skip
def test_refused_chats(server: LiveServer, body: dict[str, Any], message: str) -> None:
    assert message in error_of(server.post("/v1/chat/completions", body), 400)["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"nul", b'{"prompt": "a"} x', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"\xff"]
)
def test_what_is_not_json(server: LiveServer, path: str, body: bytes) -> None:
    error = error_of(server.post(f"/v1/{path}", body), 400)
    assert error["message"].startswith("the body cannot be read: invalid JSON")


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"5", b"null"])
def test_what_is_no_object(server: LiveServer, body: bytes) -> None:
    assert "the body cannot be read" in error_of(server.post("/v1/completions", body), 400)["message"]


def test_content_types(server: LiveServer) -> None:
    body = json.dumps({"prompt": "the fox", "max_tokens": 1}).encode()
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 415), ("", 415)):
        answer = server.post("/v1/completions", body, headers={"content-type": kind})
        assert answer.status_code == status
        if status == 415:
            assert "expected application/json" in error_of(answer, 415)["message"]


def test_a_body_that_is_too_large(server: LiveServer) -> None:
    """However its size is announced."""

    def pieces() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    for content in (b" " * (MAX_BODY_BYTES + 1), pieces()):
        answer = httpx.post(
            server.url + "/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=60
        )
        assert f"more than {MAX_BODY_BYTES} bytes" in error_of(answer, 413)["message"]


def test_paths_methods_and_models(server: LiveServer, client: openai.OpenAI) -> None:
    assert "there is no GET /v1/nothing" in error_of(server.get("/v1/nothing"), 404)["message"]
    assert "the path allows POST" in error_of(server.get("/v1/completions"), 405)["message"]
    error = error_of(server.post("/v1/completions", {"model": "gpt-5", "prompt": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-5' does not exist; this server has 'tiny', 'alias'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    for model in ("tiny", "alias", None):
        answer = server.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})
        assert answer.json()["model"] == "tiny"


def test_a_bug_is_an_error_of_that_shape_too(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.context.engine, "submit", broken)
    error = error_of(server.post("/v1/completions", {"prompt": "a"}), 500)
    assert "secret" not in error["message"]


def test_a_key(tiny_llama: Path) -> None:
    with LiveServer(tiny_llama, api_key="k 1") as server:
        for given in (None, "Bearer k", "Bearer ü", "", "Basic k 1", "k 1", "Bearer"):
            headers = {} if given is None else {"authorization": given}
            answer = server.get("/v1/models", headers={k: v.encode() for k, v in headers.items()})
            assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert server.get("/v1/models", headers={"authorization": f"{scheme} k 1"}).status_code == 200
        assert server.get("/health").status_code == 200
        assert [model.id for model in server.client().models.list()] == ["tiny", "alias"]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = make_llama(tmp_path_factory.mktemp("narrow") / "long", max_position_embeddings=4096)
    with LiveServer(path, max_waiting=2, max_num_seqs=1) as server:
        yield server


async def aborted(stream: RequestStream) -> None:
    stream.abort()


class TestQueue:
    """A server on which one request runs and two may wait."""

    def test_a_full_queue(self, narrow: LiveServer) -> None:
        """503 with Retry-After, nothing half done; those that are queued finish, and then there is room again."""
        body = {"prompt": "the fox", "max_tokens": 300, "temperature": 0, "ignore_eos": True}

        async def many() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=60) as client:
                url = narrow.url + "/v1/completions"
                return await asyncio.gather(*(client.post(url, json=body) for _ in range(12)))

        answers = asyncio.run(many())
        texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(texts) == 1
        assert refused
        assert len(refused) < 12
        for answer in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert error_of(answer, 503)["code"] == "unavailable"
        narrow.wait_idle()
        assert narrow.post("/v1/completions", body).status_code == 200

    def test_a_batch_is_queued_whole_or_not_at_all(self, narrow: LiveServer) -> None:
        """There is room for two of its three prompts."""
        engine = narrow.context.engine
        long = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
        (running,) = narrow.run(engine.submit(["the fox"], long))
        batch = {"prompt": ["a", "b", "c"], "max_tokens": 1, "ignore_eos": True}
        answer = narrow.post("/v1/completions", batch)
        assert error_of(answer, 503)["code"] == "unavailable"
        assert engine.num_unfinished_requests == 1
        narrow.run(aborted(running))
        narrow.wait_idle()
        before = narrow.stats()["num_tokens"]
        answer = narrow.post("/v1/completions", {**batch, "prompt": ["a", "b", "c", "d"]})
        assert "4 sequences in one call; at most 3 may be unfinished" in error_of(answer, 400)["message"]
        assert narrow.stats()["num_tokens"] == before
        assert len(narrow.post("/v1/completions", batch).json()["choices"]) == 3
        assert narrow.stats()["num_tokens"] == before + 3

    def test_draining(self, narrow: LiveServer) -> None:
        narrow.context.draining = True
        try:
            answer = narrow.post("/v1/completions", {"prompt": "a"})
            assert "shutting down" in error_of(answer, 503)["message"]
            assert answer.headers["connection"] == "close"
            assert narrow.get("/ready").status_code == 503
            health = narrow.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "draining")
        finally:
            narrow.context.draining = False
        assert narrow.get("/ready").status_code == 200


def test_what_is_not_http(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert server.get("/health").status_code == 200


class FailedStream:
    """A request that comes to grief after its first words."""

    def __init__(self, first: RequestOutput) -> None:
        self._outputs = [first, replace(first, finished=True, error="the logits are not numbers")]

    def __aiter__(self) -> FailedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._outputs:
            raise StopAsyncIteration
        return self._outputs.pop(0)

    async def __aenter__(self) -> FailedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        return


def test_a_request_that_fails_on_its_way(
    server: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500; in a stream, an event that says so, which openai-python raises."""

    async def submit(*args: Any, **kwargs: Any) -> list[FailedStream]:
        return [FailedStream(RequestOutput("r", "a", [1], [CompletionOutput(0, text="some words")]))]

    monkeypatch.setattr(server.context.engine, "submit", submit)
    error = error_of(server.post("/v1/completions", {"prompt": "a"}), 500)
    assert error["message"] == "the logits are not numbers"
    with pytest.raises(openai.APIError, match="the logits are not numbers"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
    streamed = server.post("/v1/completions", {"prompt": "a", "stream": True})
    text, failure, done = streamed.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(text[6:])["choices"][0]["text"] == "some words"
    assert json.loads(failure[6:])["error"]["message"] == "the logits are not numbers"
    assert done == "data: [DONE]"
