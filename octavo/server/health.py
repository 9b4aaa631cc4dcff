"""`/health`, `/ready` and `/version`: for those who watch, without a key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from octavo.engine.supervisor import Health
from octavo.server.context import Context, ContextOf
from octavo.version import VERSION

router = APIRouter()


@router.get("/health")
async def health(context: ContextOf) -> Response:
    """200 while the server lives, also while its engine is being started again; 503 when it cannot be kept up. The body
    says what is true at this moment."""
    return JSONResponse(_state(context), status_code=200 if context.engine.health.alive else 503)


@router.get("/ready")
async def ready(context: ContextOf) -> Response:
    """200 while new requests are served at once: the model is loaded, and the server is not about to end."""
    state = _state(context)
    return JSONResponse(state, status_code=200 if state["ready"] else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


def _state(context: Context) -> dict[str, Any]:
    health = context.engine.health
    return {
        "status": _status(context, health),
        "alive": health.alive,
        "ready": health.ready and not context.draining,
        "reason": health.reason,
        "num_restarts": health.num_restarts,
    }


def _status(context: Context, health: Health) -> str:
    if not health.alive:
        return "failed"
    if context.draining:
        return "draining"
    return "ok" if health.ready else "recovering"
