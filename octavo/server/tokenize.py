"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.bodies import described, read_body, shown
from octavo.server.chat import TemplateOptions
from octavo.server.context import Context, ContextOf
from octavo.server.errors import APIError
from octavo.tokenizer import Tokenizer

router = APIRouter()


class TokenizeRequest(TemplateOptions):
    """The body of `POST /tokenize`: a `prompt`, or `messages` for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: SkipValidation[list[dict[str, Any]] | None] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    async def token_ids(self, context: Context) -> list[int]:
        """
        Raises:
            APIError: 400, there is no prompt and no conversation, or both.
            RequestError: the chat template refuses.
        """
        if (self.prompt is None) == (self.messages is None):
            raise APIError(400, "give either prompt or messages", param="prompt")
        if self.prompt is None:
            return (await self.render(context, self.messages)).token_ids
        return await asyncio.to_thread(
            context.engine.tokenizer.encode, self.prompt, add_special_tokens=self.add_special_tokens is not False
        )


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize", openapi_extra=described(TokenizeRequest))
async def tokenize(request: Request, context: ContextOf) -> Response:
    """The token ids of a prompt, or of what the chat template makes of a conversation, as the engine would see them."""
    body = await read_body(request, TokenizeRequest)
    context.check_model(body.model)
    tokens = await body.token_ids(context)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": context.engine.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(_texts, context.engine.tokenizer, tokens)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.token_text(token) for token in tokens]


@router.post("/detokenize", openapi_extra=described(DetokenizeRequest))
async def detokenize(request: Request, context: ContextOf) -> Response:
    """The text of token ids, special tokens spelled out."""
    body = await read_body(request, DetokenizeRequest)
    context.check_model(body.model)
    tokenizer = context.engine.tokenizer
    last = tokenizer.vocab_size - 1
    for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token <= last:
            raise APIError(
                400, f"tokens: {shown(token)} is not a token id; the model's are 0 to {last}", param="tokens"
            )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
