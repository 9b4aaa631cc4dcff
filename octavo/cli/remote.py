"""The other partner of `octavo chat`: a server with OpenAI's HTTP API, octavo's own or another."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from octavo.cli.partners import Messages, Reply, Say
from octavo.errors import OctavoError, RequestError
from octavo.sampling_params import SamplingParams

_CONNECT_SECONDS = 10.0
_MOST_SHOWN = 200  # characters of an answer that nobody expected

_DEFAULT = SamplingParams(max_tokens=None)  # of a server, in chats
_LOST = (OSError, http.client.HTTPException)


class ServerPartner:
    """A model behind a URL. Each reply is a request of its own: the server keeps no conversation, only its prefix."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, params: SamplingParams, template_kwargs: Any = None
    ) -> None:
        """
        Args:
            url: with or without the `/v1` at its end.
            model: one of the server's; None takes the first.

        Raises:
            OctavoError: the URL is none, nothing answers there, or no model of that name does.
        """
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError as error:
            raise OctavoError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OctavoError(f"--url {url}: expected a URL such as http://127.0.0.1:8000")
        if any(not (c.isascii() and c.isprintable()) for c in api_key or ""):
            raise OctavoError("--api-key: a key is made of ASCII characters")
        self._url = url
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        card = self._find(model)
        self._context: int | None = card.get("max_model_len")  # octavo and vLLM tell
        self._body = {"model": card["id"], "stream": True, "stream_options": {"include_usage": True}, **_fields(params)}
        if template_kwargs is not None:
            self._body["chat_template_kwargs"] = template_kwargs

    @property
    def description(self) -> str:
        context = "" if self._context is None else f", context {self._context} tokens"
        return f"{self._body['model']} at {self._url}{context}"

    def reply(self, messages: Messages, say: Say) -> Reply:
        start = time.monotonic()
        first = last = None
        texts: list[str] = []
        usage: dict[str, Any] = {}
        finish_reason = None
        try:
            with closing(self._chunks({**self._body, "messages": messages})) as chunks:
                for chunk in chunks:
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or []:
                        last = time.monotonic()
                        text = choice["delta"].get("content") or ""
                        if text:
                            first = first or last
                            texts.append(text)
                            say(text)
                        finish_reason = choice.get("finish_reason") or finish_reason
        except KeyboardInterrupt:
            finish_reason = "abort"  # the connection is closed, which ends the request there
        first, last = first or last or time.monotonic(), last or start
        total = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        return Reply(
            text="".join(texts),
            finish_reason=finish_reason,
            num_tokens=usage.get("completion_tokens"),
            first_after=first - start,
            decode_time=last - first,
            filled=self._context if self._context is not None and total >= self._context else None,
        )

    def _find(self, model: str | None) -> dict[str, Any]:
        """The model's entry in the server's list."""
        try:
            with closing(self._connect()) as connection:
                answer = self._send(connection, "GET", "/models", None)
                if answer.status == 401:
                    raise OctavoError(f"{self._url} wants another API key: {_message(answer)}; give it with --api-key")
                listed: Any = json.loads(answer.read()) if answer.status == 200 else None
            cards = {card["id"]: card for card in listed["data"]}
        except _LOST as error:
            raise OctavoError(f"nothing answers at {self._url} ({error}); is a server running there?") from error
        except (ValueError, TypeError, LookupError) as error:
            raise OctavoError(f"{self._url} has no list of models at {self._path}/models: not OpenAI's API") from error
        if not cards:
            raise OctavoError(f"{self._url} has no model")
        if model is not None and model not in cards:
            raise OctavoError(f"--model {model}: {self._url} has {', '.join(cards)}")
        return cards[model] if model is not None else next(iter(cards.values()))

    def _chunks(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of one answer.

        Raises:
            RequestError: the request is refused, or its answer breaks off.
        """
        try:
            with closing(self._connect()) as connection:
                connection.sock.settimeout(None)  # a long prompt takes as long as it takes
                answer = self._send(connection, "POST", "/chat/completions", body)
                if answer.status != 200:
                    raise RequestError(_message(answer))
                for line in answer:
                    if line.startswith(b"data:"):
                        data = line.removeprefix(b"data:").strip()
                        if data == b"[DONE]":
                            return
                        yield self._event(data)
        except _LOST as error:
            raise RequestError(f"the connection to {self._url} is lost ({error})") from error
        raise RequestError(f"the connection to {self._url} is lost in the middle of the reply")

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise RequestError(f"{self._url} has sent an event that is not JSON ({error})") from error
        if not isinstance(event, dict):
            raise RequestError(f"{self._url} has sent an event that is no object: {str(event)[:_MOST_SHOWN]}")
        if "error" in event:
            raise RequestError(_told(event))
        return event

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        connection.connect()
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._path + path, data, self._headers)
        return connection.getresponse()


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The parameters as fields of a request: those that a server would not take for granted."""
    values = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    told = {name: value for name, value in values.items() if value != getattr(_DEFAULT, name)}
    if params.logit_bias:
        told["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _message(answer: http.client.HTTPResponse) -> str:
    """What an answer that is no success says, in one line."""
    text = answer.read().decode(errors="replace")
    try:
        return _told(json.loads(text))
    except (ValueError, TypeError, LookupError):
        return f"{answer.status} {answer.reason}: {' '.join(text.split())[:_MOST_SHOWN]}"


def _told(answer: Any) -> str:
    error = answer["error"]
    return " ".join(str(error["message"] if isinstance(error, dict) else error).split())
