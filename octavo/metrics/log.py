"""Structured logs: one line per event, `event=name key=value ...`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+.:/@%")


def log_event(event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
    """One event of the logger `octavo`; values with spaces or signs are quoted, so that a line splits without doubt."""
    logger = logging.getLogger("octavo")
    if logger.isEnabledFor(level):
        logger.log(level, " ".join([f"event={event}", *(f"{name}={_value(v)}" for name, v in fields.items())]))


def configure_logging(level: int) -> None:
    """Sends octavo's events to stderr; for commands only, since a library leaves that to its user."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("octavo")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else repr(text)
