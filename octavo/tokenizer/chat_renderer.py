"""Renders chat templates, in a process of its own: a model file is not trusted, and neither is its template.

chat_sandbox.py runs this file as a script (never imports it), with the limits as arguments, and talks to it in lines of
JSON on stdin and stdout:

    {"template": "...", "variables": {...}}
    {"text": "..."}   or   {"error": "one line for the user"}

An empty object comes first and says that it is ready. It imports the standard library and jinja2 only. The set-up
(blocks trimmed, loop controls, the `generation` tag, `tojson`, `raise_exception`, `strftime_now`) is the one that
transformers documents for chat templates, since that is what their authors write for.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

sys.path.extend(sys.argv[4:])  # where the parent found jinja2: isolated mode may look at fewer places

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LONGEST_MESSAGE = 300


class RaisedByTemplate(TemplateError):
    """`raise_exception(message)`: the template refuses the conversation in its own words."""


class TooLong(Exception):
    """The output passed its limit."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks replies for training masks; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012  # as declared in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class StrictEnvironment(ImmutableSandboxedEnvironment):
    """Reaching for what is forbidden is an error at once; jinja2 makes it undefined, and so an empty text at first."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")


class PublicNamespace(Namespace):
    """A namespace whose names are ordinary ones: Python's own internals begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without names, so that namespace(self=...) is a name too
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class MakesDict:
    """`dict(...)` as a function: the type itself has more to offer than a template needs."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}, which begins with an underscore")


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own, this one escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> StrictEnvironment:
    environment = StrictEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": MakesDict(),
        "namespace": PublicNamespace,
    }
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[Template, bool]:
    """The template, and whether it takes content apart itself where that is a list of parts."""
    environment = _environment()
    loops = environment.parse(source).find_all(nodes.For)
    return environment.from_string(source), any(_is_content(loop.iter) for loop in loops)


def _is_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return (isinstance(node, nodes.Name) and node.name == "content") or (
        isinstance(node, nodes.Getattr) and node.attr == "content"
    )


def _join_parts(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])


def render(source: str, variables: dict[str, Any], max_characters: int) -> str:
    template, takes_parts = _compiled(source)
    if not takes_parts:
        _join_parts(variables["messages"])
    pieces = []
    length = 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > max_characters:
            raise TooLong(f"the chat template wrote more than {max_characters} characters and was stopped")
        pieces.append(piece)
    return "".join(pieces)


def explain(error: Exception) -> str:
    """One line for the user; a template's own message word for word."""
    if isinstance(error, (RaisedByTemplate, TooLong)):
        return str(error)
    if isinstance(error, TemplateSyntaxError):
        return f"the chat template has a syntax error in line {error.lineno}: {error.message}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    where = f" in line {lines[-1]}" if lines else ""
    if isinstance(error, MemoryError):
        return f"the chat template needs too much memory{where} and was stopped"
    if isinstance(error, SecurityError):
        return f"the chat template is not safe{where} and was stopped: {_short(error)}"
    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"the chat template failed{where}: {name}{_short(error)}"


def _short(error: Exception) -> str:
    message = " ".join(str(error).split())
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."


def answer(line: bytes, max_characters: int) -> bytes:
    try:
        request = json.loads(line)
        return _written({"text": render(request["template"], request["variables"], max_characters)})
    except Exception as error:  # noqa: BLE001  # a template can raise anything, and the parent wants to hear of it
        return _written({"error": explain(error)})


def _written(value: dict[str, str]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _limit(what: int, amount: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(what, (amount, amount))


def _send(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def main(memory_bytes: int, seconds: float, max_characters: int) -> None:
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)  # no file can be written
    _limit(resource.RLIMIT_CORE, 0)
    _send(_written({}))
    for line in sys.stdin.buffer:
        # The parent keeps the time. Should it be gone, the unhandled alarm ends this process a little later.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        _send(answer(line, max_characters))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
