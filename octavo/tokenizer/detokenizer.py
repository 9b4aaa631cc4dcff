"""Streaming detokenisation: ids in, whole characters out.

Not built on `tokenizers.decoders.DecodeStream`, which takes any U+FFFD at the end of its text for an unfinished
character: a genuine one is held back, and over invalid bytes it falls silent and decodes all of them again each step.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from octavo.tokenizer.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes in UTF-8


class Detokenizer:
    """Turns the ids of one reply into text as they come, in O(1) amortised a token.

    A character may span several tokens. Only bytes that can still become a character are held back, at most three;
    bytes that never will come out as U+FFFD at once. The chunks and `flush()` joined are what one decode of prompt and
    reply together has more than the prompt alone: so the first word after a prompt keeps its leading space, and a
    character that the prompt's last token began is completed by the reply.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._tail(prompt_ids)
        self._decoder.decode(tail)  # the prompt's text is not ours to return; an unfinished character stays inside
        self._at_start = not tail

    def feed(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; empty while they end inside a character."""
        data = self._tokenizer.bytes_of(ids, skip_special_tokens=self._skip)
        if self._at_start and data:
            self._at_start = False
            if self._tokenizer.strips_leading_space:
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is still held back, as U+FFFD; call it once, when the reply has ended."""
        return self._decoder.decode(b"", final=True)

    def _tail(self, ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to hold any unfinished character; empty only if it has no text at all."""
        tail = b""
        for token_id in reversed(ids):
            tail = self._tokenizer.bytes_of([token_id], skip_special_tokens=self._skip) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail
