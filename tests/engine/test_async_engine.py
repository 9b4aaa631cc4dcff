"""AsyncLLMEngine: the engine in its own process gives what `LLM` gives, bit for bit, and keeps nothing that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from octavo import (
    LLM,
    AsyncLLMEngine,
    EngineConfig,
    RequestOutput,
    SamplingParams,
)
from octavo.engine.streams import RequestStream

PROMPTS: list[Any] = [f"the quick brown fox number {i}" for i in range(12)]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def answer(output: RequestOutput) -> Any:
    """All of an output that depends on the model."""
    choices = [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]
    return output.prompt, output.prompt_token_ids, output.prompt_logprobs, choices, output.error


async def last(stream: RequestStream) -> RequestOutput:
    output = None
    async for output in stream:
        pass
    assert output is not None
    assert output.finished
    return output


async def check_idle(engine: AsyncLLMEngine) -> None:
    """Nothing runs, waits or holds a block, in either process."""
    stats = await engine.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_used_blocks"]) == (0, 0, 0)
    assert (stats["num_held_tokens"], stats["num_unfinished_requests"]) == (0, 0)
    assert (await engine.kv_snapshot()).sequences == []
    assert engine._dispatcher.outputs._live == {}
    assert engine._dispatcher._streams == {}


def run(
    model: Path, work: Callable[[AsyncLLMEngine], Awaitable[None]], *, max_waiting: int = 1024, **config: Any
) -> None:
    """Does some work with an engine, and looks whether anything of it is left."""

    async def main() -> None:
        options = {"num_kv_blocks": 400, "num_threads": 1, **config}
        async with await AsyncLLMEngine.start(EngineConfig(str(model), **options), max_waiting=max_waiting) as engine:
            await work(engine)
            await check_idle(engine)
        assert not engine.health.alive

    asyncio.run(main())


def sampling(index: int) -> SamplingParams:
    """All kinds of requests."""
    return SamplingParams(
        temperature=index % 3 / 2,
        n=1 + index % 3,
        best_of=4 if index == 5 else None,
        logprobs=index % 3 if index % 4 else None,
        prompt_logprobs=1 if index % 2 else None,
        max_tokens=0 if index == 7 else 5 + 7 * index,
        stop=["e"] if index in (3, 8) else [],
        repetition_penalty=1.2 if index == 4 else 1.0,
        ignore_eos=True,
    )


def test_gives_what_llm_gives(tiny_llama: Path) -> None:
    params = [sampling(i) for i in range(len(PROMPTS))]
    with LLM(str(tiny_llama), num_kv_blocks=400, num_threads=1) as llm:
        expected = [answer(output) for output in llm.generate(PROMPTS, params)]

    async def work(engine: AsyncLLMEngine) -> None:
        outputs = await asyncio.gather(*map(last, await engine.submit(PROMPTS, params)))
        assert [answer(output) for output in outputs] == expected
        for output in outputs:
            metrics = output.metrics
            assert min(metrics.queue_time, metrics.prefill_time, metrics.decode_time) >= 0
            assert metrics.queue_time + metrics.prefill_time + metrics.decode_time < 60

    run(tiny_llama, work)
