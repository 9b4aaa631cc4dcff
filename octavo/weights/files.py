"""Files as the readers want them: mapped into memory, or parsed as JSON, with one clear error when that fails."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from octavo.errors import ModelError


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file read-only; arrays made over the map keep it alive.

    Raises:
        ModelError: the file cannot be opened, or is empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise ModelError(f"{path}: cannot be mapped: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Raises:
        ModelError: the file cannot be read, is not JSON, or is not an object.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object; a key that occurs twice is an error, since readers disagree about which one counts.

    Raises:
        ModelError: `text` is not such an object; the message starts with `where`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def shown(value: object) -> str:
    """A value from a file as an error message shows it: short, on one line, whatever it is."""
    if isinstance(value, str | int | float | bool | None):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    return "an array"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return result
