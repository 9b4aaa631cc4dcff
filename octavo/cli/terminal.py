"""Writing a model's text where a person may be looking."""

from __future__ import annotations

import sys

# What could move the cursor or worse, if a model wrote it to a terminal.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show(text: str) -> None:
    """To stdout as it is; on a terminal without control characters."""
    if text:
        print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)
