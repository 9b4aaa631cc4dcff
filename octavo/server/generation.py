"""The road of a request for text, whichever endpoint it came to: queued, computed, told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine import Prompt
from octavo.engine.streams import RequestStream
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.context import context_of
from octavo.server.errors import api_error, name_request
from octavo.server.replies import Reply
from octavo.server.streaming import DONE, Delta, EventStream, event, merge, while_connected


async def respond(
    request: Request,
    reply: Reply,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    priority: int | None,
    stream: bool | None,
) -> Response:
    """The response to prompts that belong together; none of them is computed on for a client that has gone away.

    Raises:
        RequestError, QueueFullError: a prompt or a parameter is refused; nothing is queued then.
        ClientDisconnect: the client has gone away.
    """
    engine = context_of(request).engine
    ids = [reply.id if len(prompts) == 1 else f"{reply.id}-{i}" for i in range(len(prompts))]
    headers = {"x-request-id": reply.id}
    name_request(request, reply.id)

    async def submit() -> list[RequestStream]:
        return await engine.submit(prompts, params, priority=priority or 0, request_ids=ids)

    async def complete() -> bytes:
        return await _whole(await submit(), reply)

    if stream:
        return EventStream(_events(await submit(), reply), headers)
    body = await while_connected(request.receive, complete())
    return Response(body, media_type="application/json", headers=headers)


async def _whole(streams: Sequence[RequestStream], reply: Reply) -> bytes:
    async with aclosing(_outputs(streams)) as items:
        last = {i: output async for i, output in items}
    deltas = [delta for i in range(len(streams)) for delta in reply.take(i, last[i])]
    return await _tell(reply, reply.whole, deltas)


async def _events(streams: Sequence[RequestStream], reply: Reply) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(_outputs(streams)) as items:
            async for i, output in items:
                deltas = reply.take(i, output)
                if deltas:
                    yield await _tell(reply, reply.events, deltas)
    except OctavoError as error:  # the status line has long been sent
        yield event(api_error(error).body()) + DONE
        return
    yield (reply.usage_event() if reply.include_usage else b"") + DONE


async def _tell(reply: Reply, how: Callable[[Sequence[Delta]], bytes], deltas: Sequence[Delta]) -> bytes:
    """The bytes of deltas. Thousands of logprobs, which come at once to whoever has read slowly, are told in a thread:
    nobody else waits for them."""
    return await asyncio.to_thread(how, deltas) if reply.is_long(deltas) else how(deltas)


async def _outputs(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Each output with the index of its prompt. Leaving this early ends what is unfinished."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        async with aclosing(merge(streams)) as items:
            async for item in items:
                yield item
