"""The engine killed and stopped under 32 streams, as clients see it: a pause. And `/health` is true all the time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from octavo.engine.life import vitals
from tests.cli.test_serve import Served
from tests.engine.failing_engine import faulty

STREAMS = 32
KILLS = [signal.SIGKILL, signal.SIGSTOP] * 5

# As `octavo serve`, with an engine whose steps take 5 ms more, and that counts as hung after 0.8 s.
WATCHFUL = """
import sys
from octavo.cli.main import main
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.supervisor import SupervisorOptions
start = AsyncLLMEngine.start
options = SupervisorOptions(module="tests.engine.failing_engine")
AsyncLLMEngine.start = lambda config, **named: start(config, options=options, hang_timeout=0.8, **named)
sys.exit(main())
"""


def body(index: int) -> dict[str, Any]:
    return {
        "prompt": f"the quick brown fox number {index}",
        "temperature": 0.0 if index % 4 == 0 else 1.0,
        "seed": index,
        "n": 1 + (index % 5 == 0),
        "logprobs": 2 if index % 2 else None,
        "max_tokens": 150 + index,
        "min_tokens": 100,
        "stop": ["e"] if index % 7 == 0 else None,
        "frequency_penalty": 0.5 if index % 6 == 0 else None,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Reader:
    """One stream: what has come of each choice, put together."""

    def __init__(self, index: int) -> None:
        self.body = body(index)
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, Any] = {}
        self.num_tokens = 0

    async def read(self, client: httpx.AsyncClient, url: str) -> Any:
        async with client.stream("POST", f"{url}/v1/completions", json=self.body) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if self._take(line)]
        assert lines[-1] == "data: [DONE]"
        assert self.usage["completion_tokens"] == self.num_tokens
        return self.choices, self.usage["prompt_tokens"]

    def _take(self, line: str) -> bool:
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            self.usage = chunk["usage"] or {}
            for part in chunk["choices"]:
                choice = self.choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": []})
                choice["text"] += part["text"]
                choice["token_ids"] += part["token_ids"]
                choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs", [])
                choice["end"] = part["finish_reason"], part["stop_reason"]
                self.num_tokens += len(part["token_ids"])
        return bool(line)


def engine(served: Served) -> tuple[int, str] | None:
    """The process that there is, and what the kernel says of it."""
    pids = served.engines()
    return (pids[0], vitals(pids[0]).state) if pids else None


class Watch:
    """Asks for `/health` all the time, and holds each answer against /proc just before and just after."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.answers: Counter[tuple[bool, str]] = Counter()
        self.last: dict[str, Any] = {}
        self._not_ready = asyncio.Event()

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            while True:
                before = engine(self.served)
                answer = await client.get(f"{self.served.url}/health")
                after = engine(self.served)
                self._check(answer, before, after)
                await asyncio.sleep(0.002)

    def _check(self, answer: httpx.Response, before: tuple[int, str] | None, after: tuple[int, str] | None) -> None:
        self.last = state = answer.json()
        assert (answer.status_code, state["alive"]) == (200, True), state
        assert state["status"] == ("ok" if state["ready"] else "recovering")
        if before == after and (before is None or before[1] in "ZXTt"):  # down all the while
            assert not state["ready"], (state, before)
            assert state["reason"] != "the engine is ready"
        self.answers[state["ready"], "gone" if before is None else before[1]] += 1
        if not state["ready"]:
            self._not_ready.set()

    async def hit(self, number: signal.Signals) -> None:
        """Does it to the engine; it has to be told within a second, and there has to be another one soon."""
        found, restarts = engine(self.served), self.last["num_restarts"]
        assert found is not None
        self._not_ready.clear()
        os.kill(found[0], number)
        await asyncio.wait_for(self._not_ready.wait(), 1.0)
        async with asyncio.timeout(20):
            while not (self.last["ready"] and self.last["num_restarts"] > restarts):
                await asyncio.sleep(0.002)
        assert self.last["num_restarts"] == restarts + 1


async def all_streams(served: Served, hits: list[signal.Signals], total: int = 0) -> list[Any]:
    """What 32 clients get, while this is done to the engine, in turn, each time after a share of so many tokens."""
    readers = [Reader(i) for i in range(STREAMS)]
    watch = Watch(served)
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        watching = asyncio.ensure_future(watch.run())
        reading = asyncio.gather(*(reader.read(client, served.url) for reader in readers))
        for i, number in enumerate(hits):
            while sum(reader.num_tokens for reader in readers) < (i + 1) * total // (len(hits) + 2):
                assert not reading.done()
                assert not watching.done(), watching.result()
                await asyncio.sleep(0.002)
            await watch.hit(number)
        answers = await reading
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):  # and not an assertion
            await watching
    assert watch.last["num_restarts"] == len(hits)
    assert watch.answers[True, "S"] + watch.answers[True, "R"] > 50
    for state in "TR" if hits else "":  # stopped, and loading
        assert watch.answers[False, state] > 10, watch.answers
    return answers


@pytest.mark.slow
def test_ten_kills_under_32_streams(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.005)
    with Served(model, "--num-kv-blocks", "1000", script=WATCHFUL) as served:
        expected = asyncio.run(all_streams(served, []))
        total = sum(len(choice["token_ids"]) for choices, _ in expected for choice in choices.values())
        start = time.monotonic()
        assert asyncio.run(all_streams(served, KILLS, total)) == expected
        assert time.monotonic() - start > 5 * 0.8  # each stopped engine was waited for
        served.process.send_signal(signal.SIGTERM)
        code, _, err = served.end()
        assert code == 0
        assert "Traceback" not in err
