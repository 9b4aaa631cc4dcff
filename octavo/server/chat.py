"""`/v1/chat/completions`: a conversation goes on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel, Field, SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine import Prompt
from octavo.sampling_params import MAX_LOGPROBS
from octavo.server.bodies import described, read_body
from octavo.server.context import Context, ContextOf
from octavo.server.errors import APIError
from octavo.server.generation import respond
from octavo.server.logprobs import chat_logprobs
from octavo.server.parameters import GenerationRequest
from octavo.server.replies import Reply
from octavo.server.streaming import Delta
from octavo.tokenizer import ChatPrompt

router = APIRouter()


class TemplateOptions(BaseModel):
    """What a chat template is told beside the messages. Its renderer checks all of it."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: SkipValidation[dict[str, Any] | None] = None
    documents: SkipValidation[list[dict[str, Any]] | None] = None

    async def render(self, context: Context, messages: Any) -> ChatPrompt:
        """
        Raises:
            RequestError: a message is malformed, there is no template, or the template refuses.
        """
        return await context.renderer.render(
            messages,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            chat_template_kwargs=self.chat_template_kwargs,
        )


class ChatCompletionRequest(GenerationRequest, TemplateOptions):
    """The body of `POST /v1/chat/completions`."""

    not_yet: ClassVar = {
        **GenerationRequest.not_yet,
        "audio": (),
        "chat_template": (),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    }

    messages: SkipValidation[list[dict[str, Any]]]
    max_completion_tokens: Annotated[int | None, Field(ge=0)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def num_logprobs(self) -> int | None:
        """
        Raises:
            APIError: 400, most likely tokens are asked for where no logprobs are.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise APIError(400, f"top_logprobs={self.top_logprobs}: set logprobs to true too", param="top_logprobs")
        return None


class ChatReply(Reply):
    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def said(self, delta: Delta, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": delta.text, "refusal": None}}
        content = {"content": delta.text} if delta.text else {}
        return {"delta": {"role": "assistant", **content} if delta.is_first else content}

    def logprobs(self, delta: Delta, top: int) -> dict[str, Any]:
        return chat_logprobs(self.tokenizer, delta.logprobs or [], top)


@router.post("/chat/completions", openapi_extra=described(ChatCompletionRequest))
async def create_chat_completion(request: Request, context: ContextOf) -> Response:
    """Replies to a conversation, which goes through the model's chat template; up to the end of the context unless
    `max_completion_tokens` (or `max_tokens`, its older name) says otherwise."""
    body = await read_body(request, ChatCompletionRequest)
    context.check_model(body.model)
    body.check()
    params = await body.sampling_params(
        logprobs=body.num_logprobs(),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
    )
    reply = ChatReply(
        model=context.model_names[0],
        num_prompts=1,
        include_usage=body.include_usage,
        return_token_ids=bool(body.return_token_ids),
        tokenizer=context.engine.tokenizer,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    rendered = await body.render(context, body.messages)
    prompt: Prompt = {"prompt_token_ids": rendered.token_ids, "cache_salt": body.cache_salt}
    return await respond(request, reply, [prompt], params, priority=body.priority, stream=body.stream)
