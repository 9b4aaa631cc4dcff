"""Reading special token ids out of config dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.errors import ModelError


def token_ids(source: Mapping[str, object], key: str) -> list[int]:
    """The ids under `key`: an int, a list of ints, or nothing.

    Raises:
        ModelError: the value is something else.
    """
    value = source.get(key)
    if value is None:
        return []
    ids: list[int] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelError(f"{key}={value!r}: expected a token id or a list of them; correct the model's config")
        ids.append(item)
    return ids


def eos_union(
    config: Mapping[str, object], generation_config: Mapping[str, object], own: Iterable[int]
) -> tuple[int, ...]:
    """Every id that ends a reply, in the order model config, generation config, tokeniser, without repeats.

    The three disagree in published models (a chat model's end of turn is often in one of them only), and an id that any
    of them names is an end.
    """
    named = [*token_ids(config, "eos_token_id"), *token_ids(generation_config, "eos_token_id"), *own]
    return tuple(dict.fromkeys(named))
