"""Finding a model, and saying so while it takes long."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.weights import resolve_model


def fetch(reference: str) -> Path:
    """`resolve_model` with its progress on stderr: a spinner on a terminal, else a line each.

    Raises:
        ModelError: there is no such model.
    """
    if not sys.stderr.isatty():
        return resolve_model(reference, progress=lambda line: print(f"octavo: {line}", file=sys.stderr, flush=True))
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        return resolve_model(reference, progress=lambda line: status.update(line))
