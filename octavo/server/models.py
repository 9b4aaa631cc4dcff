"""`/v1/models`: what the server has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from octavo.server.context import Context, ContextOf

router = APIRouter()


@router.get("/models")
async def list_models(context: ContextOf) -> dict[str, Any]:
    """The model, once under each of its names."""
    return {"object": "list", "data": [_card(context, name) for name in context.model_names]}


@router.get("/models/{name:path}")
async def get_model(name: str, context: ContextOf) -> dict[str, Any]:
    context.check_model(name)
    return _card(context, name)


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.model_names[0],
        "max_model_len": context.engine.max_model_len,
    }
