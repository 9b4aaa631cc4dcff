"""A front-end to be killed: starts an engine for a model, gives it something to do, and prints its pid."""

from __future__ import annotations

import asyncio
import sys

from octavo import AsyncLLMEngine, EngineConfig, SamplingParams
from octavo.engine.supervisor import SupervisorOptions
from tests.engine.failing_engine import MODULE


async def main(model: str) -> None:
    options = SupervisorOptions(module=MODULE)
    engine = await AsyncLLMEngine.start(EngineConfig(model, num_kv_blocks=64, num_threads=1), options=options)
    (stream,) = await engine.submit("the fox", SamplingParams(max_tokens=200, ignore_eos=True))
    await asyncio.sleep(0.2)
    print(engine.health.pid, flush=True)
    async for _ in stream:
        pass
    await asyncio.sleep(60)


asyncio.run(main(sys.argv[1]))
