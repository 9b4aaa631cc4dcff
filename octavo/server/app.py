"""The HTTP application around an engine."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from octavo.server import chat, completions, health, models, tokenize
from octavo.server.context import Context, require_key, require_open
from octavo.server.errors import add_error_handlers
from octavo.version import VERSION


def make_app(context: Context) -> FastAPI:
    """An ASGI application; whoever makes it starts and closes the engine. Two of them can live side by side."""
    app = FastAPI(title="octavo", version=VERSION, description="An OpenAI-compatible server for one model.")
    app.state.context = context
    app.include_router(health.router)
    locked = APIRouter(dependencies=[Depends(require_key)])
    locked.include_router(models.router, prefix="/v1")
    locked.include_router(tokenize.router)
    for router in (completions.router, chat.router):
        locked.include_router(router, prefix="/v1", dependencies=[Depends(require_open)])
    app.include_router(locked)
    add_error_handlers(app)
    if context.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
