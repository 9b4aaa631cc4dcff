"""The small endpoints: `/tokenize`, `/detokenize`, `/v1/models`, `/health`, `/ready`, `/version`, the description."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import pytest

import octavo
from octavo import LLM
from tests.engine.test_chat import ONE, TWO
from tests.server.live import LiveServer


@pytest.mark.parametrize("text", ["the fox", "", "\n", "café 日本 😊", "a<|turn|>b"])
def test_there_and_back(server: LiveServer, llm: LLM, text: str) -> None:
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = llm.engine.tokenizer.encode(text)
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"]) == (len(ids), 256)
    assert answer["token_strs"] == [llm.engine.tokenizer.token_text(i) for i in ids]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_conversations(server: LiveServer, llm: LLM) -> None:
    tokens = server.post("/tokenize", {"messages": TWO}).json()["tokens"]
    assert tokens == llm.chat(TWO)[0].prompt_token_ids
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"mood": "glad"}}
    tokens = server.post("/tokenize", {"messages": ONE, **options}).json()["tokens"]
    assert tokens == llm.chat(ONE, **options)[0].prompt_token_ids


@pytest.mark.parametrize(("path", "body", "message"), [
    ("tokenize", {}, "give either prompt or messages"),
    ("tokenize", {"prompt": "a", "messages": ONE}, "give either prompt or messages"),
    ("tokenize", {"prompt": 5}, "prompt=5: input should be a valid string"),
    ("tokenize", {"messages": [{"role": "critic", "content": "x"}]}, "no critics, please"),
    ("detokenize", {}, "tokens is missing"),
    ("detokenize", {"tokens": [5, 100000]}, "tokens: 100000 is not a token id"),
    ("detokenize", {"tokens": [-1]}, "tokens: -1 is not a token id"),
    ("detokenize", {"tokens": ["a"]}, "tokens[0]='a': input should be a valid integer"),
    ("detokenize", {"tokens": [True]}, "tokens[0]=True: input should be a valid integer"),
])  # fmt: skip
def test_refusals(server: LiveServer, path: str, body: dict[str, object], message: str) -> None:
    answer = server.post(f"/{path}", body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_models(server: LiveServer) -> None:
    models = list(server.client().models.list())
    assert [model.id for model in models] == ["tiny", "alias"]
    card = server.client().models.retrieve("alias")
    assert (card.object, card.root, card.max_model_len) == ("model", "tiny", 256)


def test_a_name_that_is_not_shown_is_a_name(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"model": "hidden", "prompt": "a", "max_tokens": 1})
    assert answer.json()["model"] == "tiny"
    assert server.get("/v1/models/hidden").json()["root"] == "tiny"


def test_web_pages(server: LiveServer, model: Path) -> None:
    """CORS: scripts of the pages that were named may ask and read; by default, none may."""
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization, content-type"
    with LiveServer(model, cors_origins=("https://a.example",), num_kv_blocks=32) as open_server:
        allowed = httpx.options(open_server.url + "/v1/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        for body in (
            {"prompt": "a", "max_tokens": 2, "stream": True},
            {"prompt": "a", "max_tokens": 1},
            {"prompt": ""},
        ):
            answer = open_server.post("/v1/completions", body, headers={"origin": "https://a.example"})
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        answer = open_server.get("/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=asks).headers
    assert httpx.options(server.url + "/v1/completions", headers=asks).status_code == 405


def test_states(server: LiveServer) -> None:
    for path in ("/health", "/ready"):
        answer = server.get(path)
        assert answer.status_code == 200
        assert answer.json()["alive"] is answer.json()["ready"] is True
        assert answer.json()["num_restarts"] == 0
    assert server.get("/version").json() == {"version": octavo.__version__}


def test_the_description(server: LiveServer) -> None:
    """OpenAPI knows every endpoint, and the fields of each body."""
    answer = server.get("/openapi.json")
    assert "$defs" not in answer.text  # they would be looked for elsewhere
    paths = answer.json()["paths"]
    assert paths.keys() == {
        "/health", "/ready", "/version", "/tokenize", "/detokenize",
        "/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions",
    }  # fmt: skip
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "top_k", "stream"} <= schema["properties"].keys()
    assert server.get("/docs").status_code == 200
