"""Writing where a person may be looking. rich is only imported then: what starts for a pipe starts at once."""

from __future__ import annotations

import sys
from typing import TextIO

# What could move the cursor or worse, if a model wrote it to a terminal.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show(text: str) -> None:
    """To stdout as it is; on a terminal without control characters."""
    if text:
        print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)


def show_styled(text: str, style: str, stream: TextIO) -> None:
    """A style of rich on a terminal, without control characters; elsewhere as it is."""
    if not stream.isatty():
        print(text, end="", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text.translate(_CONTROLS), style=style)
    Console(file=stream, highlight=False, soft_wrap=True).print(styled, end="")
