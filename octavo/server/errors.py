"""OpenAI's shape for whatever goes wrong: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.errors import OctavoError, QueueFullError, RequestError
from octavo.metrics import log_event
from octavo.sampling_params import SamplingParams

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it

# What a message of RequestError may begin with, as in `top_k=0.4: expected a whole number ...`
_NAMES = {f.name for f in fields(SamplingParams)} | {"priority", "cache_salt", "messages", "chat_template_kwargs"}
_NAMED = re.compile(r"(\w+)(?:\[[^\]]*\])?[=:]")
_OF_PROMPT = re.compile(r"prompt\[\d+\]: ")  # what comes before it where there are several


class APIError(OctavoError):
    """An answer to the client that is not what it asked for.

    Attributes:
        status: of the HTTP response.
        param: the field of the request that is to blame.
        code: what a program may look for, such as `model_not_found`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def unavailable(message: str, retry_after: float) -> APIError:
    """503, and the seconds after which it is worth while to try again."""
    return APIError(503, message, code="unavailable", headers={"retry-after": str(max(1, math.ceil(retry_after)))})


def api_error(error: OctavoError) -> APIError:
    """What to tell the client of an error that the engine raised."""
    message = str(error)
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return unavailable(message, error.retry_after)
    if isinstance(error, RequestError):
        return APIError(400, message, param=_blamed(message))
    return APIError(500, message)


def _blamed(message: str) -> str | None:
    """The field that an error's message names."""
    of_prompt = _OF_PROMPT.match(message)
    named = _NAMED.match(message, of_prompt.end() if of_prompt else 0)
    if named is not None and named[1] in _NAMES:
        return named[1]
    return "prompt" if of_prompt else None


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


def name_request(request: Request, name: str) -> None:
    """What its response has as `x-request-id`, be it an error."""
    request.state.octavo_id = name


def _refused(request: Request, error: APIError) -> Response:
    """The id finds the line in the log."""
    name: str = getattr(request.state, "octavo_id", None) or f"req-{uuid.uuid4().hex}"
    log_event("request_refused", {"id": name, "status": error.status, "error": str(error)})
    response = error.response()
    response.headers["x-request-id"] = name
    return response


async def _on_octavo_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OctavoError)
    return _refused(request, api_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        message = f"there is no {asked}; /docs lists what there is"
    elif error.status_code == 405:
        message = f"there is no {asked}; the path allows {(error.headers or {}).get('Allow', 'other methods')}"
    else:
        message = error.detail
    return _refused(request, APIError(error.status_code, message, headers=error.headers))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again once this is sent, so that it is logged with its traceback."""
    return _refused(request, APIError(500, "an error inside of the server; its log holds the details"))
