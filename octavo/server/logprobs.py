"""Logprobs in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.outputs import Logprob, PositionLogprobs, RequestOutput
from octavo.tokenizer import Detokenizer, Tokenizer

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[PositionLogprobs], top: int) -> dict[str, Any]:
    """The newer form: an entry a token. A token that is only part of a character shows as U+FFFD; its bytes are exact.

    Args:
        top: how many of the most likely tokens to list at each position.
    """
    return {"content": [_chat_entry(tokenizer, entry, top) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: PositionLogprobs, top: int) -> dict[str, Any]:
    (chosen, logprob), *_ = entry.items()
    return {
        **_chat_token(tokenizer, chosen, logprob),
        "top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in most_likely(entry, top)],
    }


def _chat_token(tokenizer: Tokenizer, token: int, logprob: Logprob) -> dict[str, Any]:
    data = tokenizer.bytes_of([token], skip_special_tokens=False)
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob.logprob), "bytes": list(data)}


def prompt_logprobs(entries: Iterable[PositionLogprobs | None], top: int) -> list[Any]:
    """vLLM's form for prompts: at each position the token that stands there and the most likely ones, by id."""
    return [None if entry is None else _by_id(entry, top) for entry in entries]


def _by_id(entry: PositionLogprobs, top: int) -> dict[str, Any]:
    (chosen, logprob), *_ = entry.items()
    return {
        str(token): {"logprob": finite(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
        for token, lp in [(chosen, logprob), *most_likely(entry, top)]
    }


def most_likely(entry: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    return [(token, logprob) for token, logprob in entry.items() if logprob.rank <= top]


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class TokenTexts:
    """Texts of the tokens of one text, which joined are the text: a character that takes several tokens is all in the
    last of them. Special tokens are spelled out."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)

    def next(self, token: int) -> str:
        if self._tokenizer.is_special(token):
            return self._tokenizer.token_text(token)
        return self._detokenizer.feed([token])


class CompletionLogprobs:
    """The older form: four lists, in parallel. An object of this class follows one choice from its first token on.

    ::

        text            the quick fox
        tokens          ["the", " quick", " fox"]
        text_offset     [0, 3, 9]                     where each begins in the text of the choice
        token_logprobs  [null, -2.5, -7.1]            null: nothing comes before it
        top_logprobs    [null, {" quick": -2.5, ...}, {" cat": -1.2, " fox": -7.1}]
    """

    def __init__(self, tokenizer: Tokenizer, top: int, output: RequestOutput, *, echo: str | None, hides: bool) -> None:
        """
        Args:
            top: how many of the most likely tokens to list at each position, beside the one that stands there.
            echo: the prompt's text where the choice begins with it.
            hides: special tokens are left out of the generated text.
        """
        self._tokenizer = tokenizer
        self._top = top
        self._output = output
        self._echo = echo
        self._hides = hides
        self._texts = TokenTexts(tokenizer, () if echo is not None else output.prompt_token_ids)
        self._offset = 0

    def take(self, tokens: Iterable[int], entries: Iterable[PositionLogprobs]) -> dict[str, list[Any]]:
        """The part of the lists for these tokens; the first of them also has the echoed prompt's."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._echo is not None:
            self._add_prompt(lists, self._echo)
            self._echo = None
        for token, entry in zip(tokens, entries, strict=True):
            hidden = self._hides and self._tokenizer.is_special(token)
            self._add(lists, self._texts.next(token), entry, counts=not hidden)
        return lists

    def _add_prompt(self, lists: dict[str, list[Any]], echo: str) -> None:
        """A special token counts as text where the prompt spells it, and not where the tokeniser has added it."""
        for token, entry in zip(self._output.prompt_token_ids, self._output.prompt_logprobs or [], strict=True):
            text = self._texts.next(token)
            spelled = not self._tokenizer.is_special(token) or echo.startswith(text, self._offset)
            self._add(lists, text, entry, counts=spelled)

    def _add(self, lists: dict[str, list[Any]], text: str, entry: PositionLogprobs | None, *, counts: bool) -> None:
        lists["text_offset"].append(self._offset)
        lists["tokens"].append(text)
        if counts:
            self._offset += len(text)
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        (chosen, logprob), *_ = entry.items()
        ranked = {
            self._key(token): finite(lp.logprob) for token, lp in most_likely(entry, self._top) if token != chosen
        }
        lists["token_logprobs"].append(finite(logprob.logprob))
        lists["top_logprobs"].append({**ranked, text: finite(logprob.logprob)})

    def _key(self, token: int) -> str:
        """A token's text; its bytes, as OpenAI writes them, where they are no whole characters."""
        data = self._tokenizer.bytes_of([token], skip_special_tokens=False)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
