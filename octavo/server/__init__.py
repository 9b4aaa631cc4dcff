"""The engine behind OpenAI's HTTP API."""

from octavo.server.app import make_app
from octavo.server.context import Context
from octavo.server.lifecycle import ServerOptions, serve
from octavo.server.templates import ChatRenderer

__all__ = ["ChatRenderer", "Context", "ServerOptions", "make_app", "serve"]
