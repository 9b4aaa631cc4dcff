"""What the tests of AsyncLLMEngine share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from octavo import AsyncLLMEngine, EngineConfig, RequestOutput
from octavo.engine.streams import RequestStream
from octavo.engine.supervisor import SupervisorOptions
from tests.engine.failing_engine import MODULE


def answer(output: RequestOutput) -> Any:
    """All of an output that depends on the model."""
    choices = [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]
    return output.prompt, output.prompt_token_ids, output.prompt_logprobs, choices, output.error


async def last(stream: RequestStream) -> RequestOutput:
    """Reads a stream to its end; what it gave only grew."""
    lengths: list[int] = []
    async for output in stream:
        longer = [len(output.prompt_logprobs or [])]
        longer += [length for c in output.outputs for length in (len(c.text), len(c.token_ids), len(c.logprobs or []))]
        assert all(new >= old for new, old in zip(longer, lengths, strict=False))
        lengths = longer
    assert output.finished
    return output


async def check_idle(engine: AsyncLLMEngine) -> None:
    """Nothing runs, waits or holds a block, in either process."""
    stats = await engine.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_used_blocks"]) == (0, 0, 0)
    assert (stats["num_held_tokens"], stats["num_unfinished_requests"]) == (0, 0)
    assert (await engine.kv_snapshot()).sequences == []
    dispatcher = engine._dispatcher
    assert dispatcher.outputs._live == {}
    assert dispatcher._streams == dispatcher._questions == {}
    assert len(dispatcher.ledger) == dispatcher.ledger.num_requests == 0
    assert dispatcher.idle.is_set()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def run(
    model: Path,
    work: Callable[[AsyncLLMEngine], Awaitable[None]],
    *,
    max_waiting: int = 1024,
    hang_timeout: float = 30.0,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    """Does some work with an engine, and looks whether anything of it is left."""

    async def main() -> None:
        engine = await AsyncLLMEngine.start(
            EngineConfig(str(model), **{"num_kv_blocks": 1000, "num_threads": 1, **config}),
            max_waiting=max_waiting,
            hang_timeout=hang_timeout,
            options=SupervisorOptions(module=MODULE, **(options or {})),
        )
        async with engine, asyncio.timeout(120):
            await work(engine)
            if engine.health.alive:
                await until(lambda: engine.health.ready)
                await check_idle(engine)
        assert not engine.health.alive
        assert engine.health.pid is None

    asyncio.run(main())
