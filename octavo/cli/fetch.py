"""Finding a model, and saying so while it takes long."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from octavo.weights import resolve_model


def fetch(reference: str) -> Path:
    """`resolve_model` with its progress on stderr: a spinner on a terminal, else a line each.

    Raises:
        ModelError: there is no such model.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        return resolve_model(reference, progress=lambda line: console.print(f"octavo: {line}", markup=False))
    with console.status("") as status:
        return resolve_model(reference, progress=lambda line: status.update(line))
