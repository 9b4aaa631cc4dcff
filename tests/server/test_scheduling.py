"""What the scheduler does to requests, as their clients see it: nothing but time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.engine.failing_engine import faulty
from tests.server.live import LiveServer

PROMPTS = ["the fox", "a journey", "numbers such", "the quick brown", "lazy dog", "a single step"]


def body(prompt: Any, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "logprobs": 1, **options}


def together(server: LiveServer, bodies: list[dict[str, Any]], *, after: float = 0.0) -> list[dict[str, Any]]:
    """Sent at once, the last one `after` that many seconds."""

    async def main() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=60) as client:

            async def one(i: int) -> dict[str, Any]:
                if i == len(bodies) - 1:
                    await asyncio.sleep(after)
                answer = await client.post(f"{server.url}/v1/completions", json=bodies[i])
                assert answer.status_code == 200, answer.text
                order.append(i)
                return answer.json()

            return await asyncio.gather(*map(one, range(len(bodies))))

    order: list[int] = []
    answers = asyncio.run(main())
    for place, i in enumerate(order):
        answers[i]["place"] = place
    return answers


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_pool_so_small_that_requests_are_preempted(
    model: Path, server: LiveServer, tmp_path: Path, policy: str
) -> None:
    """CASES 30, 31: texts and logprobs are those of a roomy pool; `timings` tells of the preemptions. One that came
    last and goes first, since its priority says so, puts others out of the pool and ends before all of them."""
    alone = [server.post("/v1/completions", body(prompt)).json()["choices"][0] for prompt in PROMPTS]
    slow = faulty(model, tmp_path / "model", step_seconds=0.003)  # so that the last one comes long before any has ended
    with LiveServer(slow, num_kv_blocks=20, scheduling_policy=policy) as small:
        bodies = [body(prompt) for prompt in PROMPTS]
        bodies[-1]["priority"] = -100
        answers = together(small, bodies, after=0.02)
        assert [answer["choices"][0] for answer in answers] == alone
        assert sum(answer["timings"]["num_preemptions"] for answer in answers) == small.stats()["num_preemptions"] > 0
        if policy == "priority":
            assert answers[-1]["timings"]["num_preemptions"] == 0
            assert answers[-1]["place"] <= 2  # those that were nearly done may be done before it
        small.wait_idle()


def test_a_prompt_that_can_never_fit(model: Path) -> None:
    """CASES 32: refused at once with the numbers, and the others in the queue go on."""
    with LiveServer(model, num_kv_blocks=8) as small:
        ids = [3 + i % 200 for i in range(200)]

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=60) as client:
                bodies = [body("the fox"), body(ids), body("a journey")]
                return await asyncio.gather(*(client.post(f"{small.url}/v1/completions", json=one) for one in bodies))

        first, refused, last = asyncio.run(main())
        assert first.status_code == last.status_code == 200
        assert refused.status_code == 400
        assert "the prompt has 200 tokens; the context holds 128" in refused.json()["error"]["message"]
