"""What a conversation may look like: the messages of OpenAI's chat API, text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError

Message = Mapping[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def is_batch(messages: object) -> bool:
    """Whether this is a list of conversations; otherwise it is taken for one."""
    return isinstance(messages, list | tuple) and bool(messages) and all(isinstance(m, list | tuple) for m in messages)


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of the messages as templates expect them: without the keys that are None, and with reasoning under the
    first of its names.

    Raises:
        RequestError: a message has no role, no content, or content that is not text; its place is named.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages={_short(messages)}: expected a list of messages, each with a role and content")
    if not messages:
        raise RequestError("the conversation is empty: give at least one message")
    return [_checked(message, f"message {i}") for i, message in enumerate(messages)]


def checked_objects(name: str, values: object) -> list[dict[str, Any]] | None:
    """`tools` or `documents`: a list of objects, or None.

    Raises:
        RequestError: it is something else.
    """
    if values is None:
        return None
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise RequestError(f"{name}={_short(values)}: expected a list of objects")
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}[{i}] is {_short(value)}: expected an object")
    return [dict(value) for value in values]


def _checked(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {_short(message)}: expected an object with a role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} has the role {_short(role)}: expected text such as 'user'")
    if "content" in kept:
        _check_content(kept["content"], where)
    elif not kept.get("tool_calls"):
        raise RequestError(f"{where} ({role}) has no content: give text")
    reasoning = next((kept[name] for name in _REASONING_NAMES if name in kept), None)
    if reasoning is not None:  # published templates read the first name, or the second
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _check_content(content: object, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} has the content {_short(content)}: expected text, or a list of text parts")
    if not content:
        raise RequestError(f"{where} has an empty list as content: give text")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or "type" not in part:
            raise RequestError(
                f'{where}, content part {i} is {_short(part)}: expected {{"type": "text", "text": "..."}}'
            )
        if part["type"] != "text":
            raise RequestError(f"{where}, content part {i} is of type {_short(part['type'])}: only text is supported")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}, content part {i} has the text {_short(part.get('text'))}: expected text")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
