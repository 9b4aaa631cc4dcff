"""What the endpoints share. It hangs on the app, so that one process can hold several servers."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.server.errors import APIError, unavailable
from octavo.server.templates import ChatRenderer

DRAIN_RETRY_SECONDS = 5.0  # by then another server may listen in this one's place


@dataclass(slots=True)
class Context:
    engine: AsyncLLMEngine
    renderer: ChatRenderer
    model_names: tuple[str, ...]  # what a request may call the model; responses name the first
    api_key: str | None = None
    aliases: tuple[str, ...] = ()  # what it may call it too; not shown
    cors_origins: tuple[str, ...] = ()  # web pages that may ask, "*": all of them
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # no new work is taken

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            APIError: 404, the model has another name; a request that names none means the one that is there.
        """
        if name is not None and name not in self.model_names and name not in self.aliases:
            raise APIError(
                404,
                f"model={name[:80]!r} does not exist; this server has {', '.join(map(repr, self.model_names))}",
                param="model",
                code="model_not_found",
            )


def public_name(model: str) -> str:
    """What to call a model that was given no name: of a local path its last part, the rest being nobody's business."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def _context(request: Request) -> Context:
    return context_of(request)


ContextOf = Annotated[Context, Depends(_context)]


async def require_key(request: Request) -> None:
    """
    Raises:
        APIError: 401, the server was started with a key and the request does not bring it.
    """
    key = context_of(request).api_key
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":  # RFC 9110: whichever case
        given = ""
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise APIError(
            401,
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


async def require_open(request: Request) -> None:
    """
    Raises:
        APIError: 503, the server finishes what it has and then ends.
    """
    if context_of(request).draining:
        error = unavailable("the server is shutting down; send the request to another one", DRAIN_RETRY_SECONDS)
        error.headers["connection"] = "close"
        raise error
