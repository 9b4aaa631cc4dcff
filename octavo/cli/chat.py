"""`octavo chat`: talk with a model on the terminal, or let a script do so, one line a turn."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from octavo.cli.fetch import fetch
from octavo.cli.options import add_engine_flags, add_sampling_flags, engine_from, read_chat_template, sampling_from
from octavo.cli.partners import EnginePartner, Partner
from octavo.cli.remote import ServerPartner
from octavo.cli.terminal import show
from octavo.config import DEMO_MODEL, EngineConfig
from octavo.errors import OctavoError, RequestError
from octavo.llm import load_engine
from octavo.tokenizer import ChatTemplates

HELP = """\
/clear         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/help          this list
/exit          leave, as does Ctrl-D
Ctrl-C         stop the reply; what was said stays in the conversation
A message that begins with a slash: put a space before it."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talks with a model, here or behind a server's URL, on the terminal. Without a terminal each line "
        "of stdin is a turn, and stdout holds the replies.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="M", help=f"(default: {DEMO_MODEL})")
    parser.add_argument("--url", help="of a server with OpenAI's HTTP API, which answers; no model is loaded here")
    parser.add_argument("--model", dest="served_model", metavar="NAME", help="with --url (default: the server's first)")
    parser.add_argument("--api-key", metavar="KEY", help="with --url")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, or the name of one of the model's templates"
    )
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="variables of the template, as in '{\"enable_thinking\": false}'"
    )
    parser.add_argument("--quiet", action="store_true", help="neither boot report nor statistics on stderr")
    single = ("n", "best_of", "logprobs", "prompt_logprobs")
    add_sampling_flags(parser, without=single, temperature=0.7, top_p=0.95, max_tokens=None)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    notes = Console(stderr=True, quiet=args.quiet, highlight=False, soft_wrap=True, style="dim")
    return _with_server(args, notes) if args.url is not None else _with_engine(args, notes)


def _with_server(args: argparse.Namespace, notes: Console) -> int:
    _refuse(_given(args, ("model", "chat_template", *_ENGINE)), "is for a model that is loaded here: leave --url out")
    variables = _variables(args.chat_template_kwargs)
    partner = ServerPartner(args.url, args.served_model, args.api_key, sampling_from(args), variables)
    notes.print(partner.description, markup=False)
    return Repl(partner, args.system, notes).run()


def _with_engine(args: argparse.Namespace, notes: Console) -> int:
    _refuse(_given(args, ("served_model", "api_key")), "is for a server: give its --url")
    params = sampling_from(args)
    options = {
        "chat_template": read_chat_template(args.chat_template),
        "chat_template_kwargs": _variables(args.chat_template_kwargs),
    }
    args.model = args.model or DEMO_MODEL
    config = engine_from(args)
    engine = load_engine(replace(config, model=str(fetch(config.model))), progress=False if args.quiet else None)
    templates = ChatTemplates(engine.tokenizer)
    try:
        if args.chat_template is None and not engine.tokenizer.chat_templates:
            raise OctavoError(f"{args.model} has no chat template; give one with --chat-template FILE")
        notes.print(str(engine.boot_report), markup=False)
        return Repl(EnginePartner(engine, templates, params, options), args.system, notes).run()
    finally:
        templates.close()
        engine.close()


_ENGINE = {f.name: f.default for f in fields(EngineConfig) if f.name != "model"}
_FLAGS = {"model": "M", "served_model": "--model"}


def _given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those flags among the named ones that say something else than their default."""
    given = [name for name in names if getattr(args, name) != _ENGINE.get(name)]
    return [_FLAGS.get(name, "--" + name.replace("_", "-")) for name in given]


def _refuse(flags: list[str], why: str) -> None:
    if flags:
        raise OctavoError(f"{flags[0]} {why}")


def _variables(given: str | None) -> Any:
    try:
        return None if given is None else json.loads(given)
    except json.JSONDecodeError as error:
        raise OctavoError(f"--chat-template-kwargs: {given!r} is not JSON ({error})") from error


class Repl:
    """Reads a line, streams the reply, and keeps the conversation.

    Replies go to stdout, all else to stderr.
    """

    def __init__(self, partner: Partner, system: str | None, notes: Console) -> None:
        self.partner = partner
        self.system = system
        self.notes = notes
        self.turns: list[dict[str, str]] = []
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """Until the input ends. Returns the exit code: 1 if a turn of a script was refused."""
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        refused = False
        for line in self._lines():
            text = line.strip()
            if text == "/exit":
                break
            try:
                if line.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except RequestError as error:
                refused = True
                print(f"octavo: error: {error}", file=sys.stderr)
        return 1 if refused and not self.interactive else 0

    def _lines(self) -> Iterator[str]:
        if not self.interactive:
            yield from sys.stdin
            return
        if find_spec("readline") is not None:  # some builds of Python lack it; then the terminal's own editing must do
            importlib.import_module("readline")
        self._tell("/help lists the commands")
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                self._tell("/exit or Ctrl-D leaves")

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/clear":
            self.turns.clear()
            self._tell("the conversation is forgotten")
        elif name == "/system":
            self.system = rest.strip() or None
            self._tell("the system message is set" if self.system else "there is no system message now")
        elif name == "/help":
            self._tell(HELP)
        else:
            raise RequestError(f"there is no command {name}; /help lists them")

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        turn = {"role": "user", "content": text}
        reply = self.partner.reply([*system, *self.turns, turn], show)
        if reply.finish_reason == "abort" and not reply.text:
            self._tell("stopped before the first word; the message is forgotten")
            return
        self.turns += [turn, {"role": "assistant", "content": reply.text}]
        print(end="" if reply.text.endswith("\n") else "\n", flush=True)
        self._tell(f"[{reply.summary()}]")

    def _tell(self, text: str) -> None:
        self.notes.print(text, markup=False)
