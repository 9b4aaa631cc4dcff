"""`/v1/completions`: text goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine import Prompt
from octavo.sampling_params import MAX_LOGPROBS
from octavo.server.bodies import described, read_body, shown
from octavo.server.context import ContextOf
from octavo.server.errors import APIError
from octavo.server.generation import respond
from octavo.server.logprobs import CompletionLogprobs, TokenTexts
from octavo.server.parameters import GenerationRequest
from octavo.server.replies import Reply
from octavo.server.streaming import Delta

router = APIRouter()

_EXPECTED = "expected text, a list of token ids, or a list of either"


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    not_yet: ClassVar = {**GenerationRequest.not_yet, "prompt_embeds": (), "suffix": ("",)}

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def prompts(self) -> list[Prompt]:
        """
        Raises:
            APIError: 400, `prompt` is nothing that could be one, or several.
        """
        given: Any = self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and all(map(_is_id, given))):
            given = [given]
        if not isinstance(given, list):
            raise APIError(400, f"prompt={shown(given)}: {_EXPECTED}", param="prompt")
        if not given:
            raise APIError(400, "prompt=[]: give at least one prompt, of at least one token", param="prompt")
        return [self._prompt(i, item) for i, item in enumerate(given)]

    def _prompt(self, index: int, item: Any) -> Prompt:
        if isinstance(item, str):
            return {"prompt": item, "cache_salt": self.cache_salt}
        if isinstance(item, list):
            return {"prompt_token_ids": item, "cache_salt": self.cache_salt}
        raise APIError(400, f"prompt[{index}]={shown(item)}: {_EXPECTED}", param="prompt")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(kw_only=True)
class CompletionReply(Reply):
    echo: bool
    skip_special_tokens: bool
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)  # by choice

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def said(self, delta: Delta, *, whole: bool) -> dict[str, Any]:
        return {"text": (self._echoed(delta) or "") + delta.text}

    def logprobs(self, delta: Delta, top: int) -> dict[str, Any]:
        if delta.is_first:
            self._logprobs[delta.index] = CompletionLogprobs(
                self.tokenizer, top, delta.output, echo=self._echoed(delta), hides=self.skip_special_tokens
            )
        return self._logprobs[delta.index].take(delta.token_ids, delta.logprobs or [])

    def _echoed(self, delta: Delta) -> str | None:
        """The prompt, where this delta begins with it: as it was given; of token ids, what they spell."""
        if not (self.echo and delta.is_first):
            return None
        if delta.output.prompt is not None:
            return delta.output.prompt
        texts = TokenTexts(self.tokenizer)
        return "".join(texts.next(token) for token in delta.output.prompt_token_ids)


@router.post("/completions", openapi_extra=described(CompletionRequest))
async def create_completion(request: Request, context: ContextOf) -> Response:
    """Continues each prompt: text, a list of token ids, or a list of either."""
    body = await read_body(request, CompletionRequest)
    context.check_model(body.model)
    body.check()
    params = await body.sampling_params(logprobs=body.logprobs, prompt_logprobs=_prompt_logprobs(body))
    prompts = body.prompts()
    reply = CompletionReply(
        model=context.model_names[0],
        num_prompts=len(prompts),
        include_usage=body.include_usage,
        return_token_ids=bool(body.return_token_ids),
        tokenizer=context.engine.tokenizer,
        echo=bool(body.echo),
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=params.skip_special_tokens,
    )
    return await respond(request, reply, prompts, params, priority=body.priority, stream=body.stream)


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many to ask the engine for: what is echoed has logprobs too."""
    if body.echo and body.logprobs is not None:
        return max(body.logprobs, body.prompt_logprobs or 0)
    return body.prompt_logprobs
