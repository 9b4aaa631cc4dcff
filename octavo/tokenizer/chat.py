"""From a conversation to the prompt that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from octavo.errors import RequestError
from octavo.tokenizer.chat_guard import Guard, free_characters
from octavo.tokenizer.chat_messages import Message, checked_messages, checked_objects
from octavo.tokenizer.chat_sandbox import Sandbox
from octavo.tokenizer.tokenizer import Tokenizer

_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a template made of a conversation."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as a template has written it, not tokenised yet."""

    guarded: str  # with a guard in every special token that the request spells out
    guard: str

    @property
    def text(self) -> str:
        return self.guarded.replace(self.guard, "")


class ChatTemplates:
    """The chat templates of one model, and what runs them.

    ::

        check the messages -> choose a template -> guard special tokens -> render in the sandbox -> tokenise

    Safe to share between threads. `close` ends the process that renders; without it, it ends with this object.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self._sandbox = Sandbox()

    def render(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """The prompt of one conversation: `write`, whose arguments and errors these are, then `tokenize`."""
        return self.tokenize(self.write(messages, **options))

    def write(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Written:
        """The text of one conversation. The template alone decides whether it begins with BOS.

        Args:
            messages: objects with `role` and `content` (text, or a list of `{"type": "text", "text": ...}`); other
                keys, such as `tool_calls`, are the template's business.
            tools: JSON schemas of functions that the model may call.
            documents: texts for templates that know of them.
            chat_template: Jinja source, or the name of one of the model's templates. None takes the model's default,
                or `tool_use` where there are tools and the model has such a template.
            add_generation_prompt: end with the header of a reply.
            continue_final_message: leave the last message open, so that the model goes on with it; needs
                add_generation_prompt=False.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: the conversation is malformed, there is no template, or the template refuses or fails.
        """
        conversation = checked_messages(messages)
        request = {
            **_checked_kwargs(chat_template_kwargs),
            "messages": conversation,
            "tools": checked_objects("tools", tools),
            "documents": checked_objects("documents", documents),
        }
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; give add_generation_prompt=False "
                "to continue the last message"
            )
        template = self.source(chat_template, has_tools=tools is not None)
        written = _as_json(request)
        guard, end = islice(free_characters(written + template), 2)
        request = self._guard.protect(json.loads(written), guard)
        last = _mark_end(request["messages"][-1], end) if continue_final_message else ""
        variables = {**self._tokenizer.named_tokens, **request, "add_generation_prompt": bool(add_generation_prompt)}
        text = self._sandbox.render(template, variables)
        if continue_final_message:
            text = _cut(text, end, last)
        return Written(text, guard)

    def tokenize(self, written: Written) -> ChatPrompt:
        text, guard = written.guarded, written.guard
        token_ids = self._tokenizer.encode_guarded(text, guard) if guard in text else self._plain_ids(text)
        return ChatPrompt(written.text, token_ids)

    def close(self) -> None:
        self._sandbox.close()

    def source(self, given: str | None, *, has_tools: bool = False) -> str:
        """The template that `render` would take for this `chat_template`.

        Raises:
            RequestError: there is none.
        """
        known = self._tokenizer.chat_templates
        if given is not None and not isinstance(given, str):
            raise RequestError(f"chat_template={given!r}: expected Jinja source, or the name of a template")
        if given is not None and given not in known and "{" in given:
            return given
        name = given or ("tool_use" if has_tools and "tool_use" in known else "default")
        if name in known:
            return known[name]
        if given is not None:
            raise RequestError(
                f"chat_template={given!r} is neither Jinja source nor the name of one of the model's templates "
                f"({', '.join(known) or 'it has none'})"
            )
        if known:
            raise RequestError(f"the model has no default chat template; name one of {', '.join(known)}")
        raise RequestError(
            "the model has no chat template: it is not made for chat, or its file leaves it out; give one as "
            "chat_template (Jinja source)"
        )

    def _plain_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _checked_kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise RequestError(f"chat_template_kwargs={kwargs!r}: expected an object with the template's variables")
    for name in _OWN_VARIABLES:
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs must not hold {name!r}; it is an argument of its own")
    return dict(kwargs)


def _as_json(request: Mapping[str, Any]) -> str:
    """All that a template sees of a request is plain JSON."""
    try:
        written = json.dumps(request, ensure_ascii=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the conversation holds the lone surrogate U+{ord(error.object[error.start]):04X}; send valid Unicode"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"messages, tools, documents and chat_template_kwargs must be plain JSON: {error}"
        ) from error
    return written


def _mark_end(message: dict[str, Any], mark: str) -> str:
    """Puts the mark and a space behind the message's text, which is returned as it was."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = f"{content}{mark} "
        return content
    if not content:
        raise RequestError("continue_final_message: the last message has no content to continue")
    text: str = content[-1]["text"]
    content[-1]["text"] = f"{text}{mark} "
    return text


def _cut(text: str, mark: str, last: str) -> str:
    """The text up to the mark. Where the template has trimmed the message (the space behind the mark is gone), white
    space before the mark goes too."""
    kept, found, rest = text.rpartition(mark)
    if not found or last.strip() not in kept:
        raise RequestError(
            "continue_final_message: the chat template leaves the last message out or rewrites it, so it cannot be "
            "continued"
        )
    kept = kept.replace(f"{mark} ", "").replace(mark, "")
    return kept if rest.startswith(" ") else kept.rstrip()
