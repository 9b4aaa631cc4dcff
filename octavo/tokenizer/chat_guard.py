"""Keeps special tokens inert that a request spells out: nobody ends a turn by writing `<|im_end|>` into a message.

A guard, a character that occurs nowhere in the request, goes into every special token that a string of the request
spells out, before the template sees it. What is whole after rendering was written by the template; the guards are
taken out as the text is tokenised (`Tokenizer.encode_guarded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from octavo.tokenizer.tokenizer import Tokenizer

# Unicode promises never to assign the first range; the second, for private use, is only there so as never to run out.
_CANDIDATES = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))


def free_characters(text: str) -> Iterator[str]:
    """Characters that do not occur in `text`."""
    used = set(text)
    return (char for char in map(chr, chain(*_CANDIDATES)) if char not in used)


class Guard:
    """Breaks what special tokens are spelled like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        starts = {text[:end] for text in tokenizer.special_texts for end in range(1, len(text))}
        # Not those that look like words, lest roles and names that a template compares change, and no white space at
        # the end, which it may trim.
        self._starts = {start for start in starts if not start.isalnum() and not start[-1].isspace()}
        self._longest_start = max(map(len, self._starts), default=0)

    def protect(self, value: Any, guard: str) -> Any:
        """A copy of a JSON-like value with guards in all of its strings, keys included."""
        if isinstance(value, str):
            return self._text(value, guard)
        if isinstance(value, dict):
            return {self.protect(key, guard): self.protect(item, guard) for key, item in value.items()}
        if isinstance(value, list):
            return [self.protect(item, guard) for item in value]
        return value

    def _text(self, text: str, guard: str) -> str:
        # A broken token can bare another one that it overlaps, hence again until none is whole. A token of a single
        # character cannot be broken.
        while spans := [start for start, end in self._tokenizer.special_spans(text) if end - start > 1]:
            cuts = [0, *(start + 1 for start in spans), len(text)]
            text = guard.join([text[a:b] for a, b in pairwise(cuts)])
        # A string that ends like the start of a token must not become one with what the template puts behind it.
        if any(text[-n:] in self._starts for n in range(1, min(self._longest_start, len(text)) + 1)):
            text += guard
        return text
