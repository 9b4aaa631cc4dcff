"""Request bodies: read within a limit, parsed and checked; what is refused is named."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from octavo.server.errors import APIError

MAX_BODY_BYTES = 16 * 2**20
BODY_SECONDS = 60.0  # in which a body has to arrive
MAX_SHOWN = 60  # characters of a refused value that a message repeats

Body = TypeVar("Body", bound=BaseModel)


def described(model: type[BaseModel]) -> dict[str, Any]:
    """The body for the OpenAPI description of an endpoint."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


async def read_body(request: Request, model: type[Body]) -> Body:
    """The request's body as `model`. Read here and not by FastAPI: within a limit, and with a parser that refuses lone
    surrogates and deep nesting, which no part behind this one could bear.

    Raises:
        APIError: 400, it is not JSON or not such a body; 408, it comes too slowly; 413, it is too large; 415, it is
            said to be something else.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, f"content-type={shown(kind)}: expected application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _bytes(request)
    except TimeoutError as error:
        message = f"the body has not arrived within {BODY_SECONDS:g} seconds; send it faster, or less at once"
        raise APIError(408, message, headers={"connection": "close"}) from error
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


async def _bytes(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            message = f"the body has more than {MAX_BODY_BYTES} bytes; send less at once"
            raise APIError(413, message, headers={"connection": "close"})
    return bytes(body)


def shown(value: object) -> str:
    """A value for a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _refusal(error: ValidationError) -> APIError:
    """The first of what pydantic found."""
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    message = first["msg"][:1].lower() + first["msg"][1:]
    if not first["loc"]:
        return APIError(400, f"the body cannot be read: {message}")
    name = str(first["loc"][0]) + "".join(f"[{part!r}]" for part in first["loc"][1:])
    if first["type"] == "missing":
        return APIError(400, f"{name} is missing", param=name)
    return APIError(400, f"{name}={shown(first['input'])}: {message}", param=name)
