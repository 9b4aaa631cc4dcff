"""`octavo serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from octavo.cli.fetch import fetch
from octavo.cli.options import add_engine_flags, engine_from, read_chat_template
from octavo.cli.terminal import show_styled
from octavo.config import DEMO_MODEL
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.server import ServerOptions, serve
from octavo.server.context import public_name

EPILOG = """\
The URL is printed on stdout once the model is loaded; everything else goes to stderr.
SIGTERM (or Ctrl-C) finishes what is running and ends; new requests get a 503. A second one stops at once, at any time.
Exit code: 0 after that; 1 when a second signal cut requests off, or the engine could not be kept up."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model behind OpenAI's HTTP API: completions, chat completions, models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ServerOptions()
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, metavar="M", help=f"(default: {DEMO_MODEL})")
    parser.add_argument("--quiet", action="store_true", help="no boot report on stderr")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default=default.host, help="address to listen on; 0.0.0.0 means all (default: %(default)s)"
    )
    group.add_argument("--port", type=int, default=default.port, help="0 takes any that is free (default: %(default)s)")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what requests call the model, instead of M (of a local path: its last part); give the flag once for each "
        "name, responses have the first",
    )
    group.add_argument("--api-key", metavar="KEY", help="refuse requests that do not bring it; not those for /health")
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let scripts of web pages from there ask, such as https://example.org, or '*' for all; give the flag once "
        "for each (default: none)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, or the name of one of the model's templates"
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=default.max_waiting,
        metavar="INT",
        help="sequences that may wait beyond --max-num-seqs; one more gets a 503 (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=default.drain_seconds,
        metavar="FLOAT",
        help="after a SIGTERM, what is not finished by then is cut off (default: %(default)s)",
    )
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    options = ServerOptions(
        host=args.host,
        port=args.port,
        model_names=tuple(args.served_model_name or [public_name(args.model)]),
        model_aliases=() if args.served_model_name else (args.model,),
        cors_origins=tuple(args.cors_origin or ()),
        api_key=args.api_key,
        chat_template=read_chat_template(args.chat_template),
        max_waiting=args.max_waiting,
        drain_seconds=args.drain_seconds,
    )
    config = engine_from(args)
    config = replace(config, model=str(fetch(config.model)))

    def on_ready(url: str, engine: AsyncLLMEngine) -> None:
        if not args.quiet:
            show_styled(f"{engine.boot_report}\n", "dim", sys.stderr)
        print(url, flush=True)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(config, options, on_ready=on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
