"""Chat templates on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from octavo.tokenizer import ChatPrompt, ChatTemplates, Tokenizer
from octavo.tokenizer.chat import Written


class ChatRenderer:
    """Renders one conversation at a time, in a thread: a render takes a millisecond, but a template that loops takes
    seconds until it is stopped, and then it should hold one thread, not all of them. What was rendered is tokenised
    beside the next render."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        check_text: Callable[[str], None] = lambda text: None,
    ) -> None:
        """
        Args:
            check_text: raises RequestError of a rendered text that is not worth to be tokenised.
            chat_template: Jinja source, or the name of one of the model's templates; None takes the model's default.

        Raises:
            RequestError: there is no template of that name.
        """
        self._templates = ChatTemplates(tokenizer)
        if chat_template is not None:
            self._templates.source(chat_template)
        self._chat_template = chat_template
        self._check_text = check_text
        self._lock = asyncio.Lock()

    async def render(self, messages: Any, **options: Any) -> ChatPrompt:
        """`ChatTemplates.render`, whose arguments and errors these are."""
        async with self._lock:
            written = await asyncio.to_thread(
                self._templates.write, messages, chat_template=self._chat_template, **options
            )
        return await asyncio.to_thread(self._tokenize, written)

    def _tokenize(self, written: Written) -> ChatPrompt:
        self._check_text(written.text)
        return self._templates.tokenize(written)

    def close(self) -> None:
        self._templates.close()
