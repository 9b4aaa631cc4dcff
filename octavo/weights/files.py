"""Files as the readers want them: mapped into memory, or parsed as JSON, with one clear error when that fails."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ModelError

CLOCK_TICK = 0.02  # seconds; file systems stamp changes with a clock that moves on every 10 ms or sooner


class FileIdentity(NamedTuple):
    """Which file this is, and which state of it, whatever its path: any change gives it another `ctime_ns`."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def identify(path: Path) -> FileIdentity:
    """The identity of a file that is then opened: what is read from it afterwards is of this state or of a later one.

    So what was made of it may be kept under this identity: a later state has another. Two changes in one tick of the
    clock would look alike, so that a file which changed only just now is waited for.

    Raises:
        ModelError: there is no such file.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if abs(time.time() - stat.st_ctime) < CLOCK_TICK:
        time.sleep(CLOCK_TICK)
    return FileIdentity(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


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
