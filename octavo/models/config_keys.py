"""Typed reading of a model's configuration, with errors that name the key."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError


class ConfigKeys:
    """A config.json-style dict. A null counts as absent, as Hugging Face writes it for "not set".

    Getters raise ModelError when a key without a default is missing, or its value is of the wrong type or not
    positive.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigKeys:
        return ConfigKeys({**defaults, **self.values}, self._path)

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to `most`."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number > 0."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "a number > 0")
        return float(value)

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty when absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of texts")
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers > 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and 0 < item < math.inf for item in value
        ):
            raise self.error(key, "a list of numbers > 0")
        return [float(item) for item in value]

    def token_ids(self, key: str) -> list[int]:
        """One token id or a list of them; empty when absent."""
        value = self.values.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.error(key, "a token id or a list of them")
        return ids

    def section(self, key: str) -> ConfigKeys:
        """A nested dict; empty when absent."""
        value = self.values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return ConfigKeys(value, f"{self._path}{key}.")

    def error(self, key: str, expected: str) -> ModelError:
        """To be raised: this key's value is not what it should be."""
        value = reprlib.repr(self.values.get(key))
        return ModelError(f"model configuration: {self._path}{key} is {value}, expected {expected}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ModelError(f"model configuration: the key {self._path}{key} is missing")
        return value
