"""AsyncLLMEngine: it gives what `LLM` gives, bit for bit, keeps nothing that has ended, and bounds what waits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import (
    LLM,
    AsyncLLMEngine,
    BeamSearchParams,
    ConfigError,
    EngineConfig,
    ModelError,
    QueueFullError,
    RequestError,
    SamplingParams,
)
from octavo.engine import async_llm_engine, dispatcher
from tests.engine.async_helpers import answer, check_idle, last, run, until
from tests.engine.failing_engine import faulty

PROMPTS: list[Any] = [f"the quick brown fox number {i}" for i in range(12)]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def sampling(index: int) -> SamplingParams:
    """All kinds of requests; those without a seed draw one from the engine's."""
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


@pytest.fixture
def slow_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """Its steps take 3 ms more."""
    return faulty(tiny_llama, tmp_path / "slow", step_seconds=0.003)


def test_gives_what_llm_gives(tiny_llama: Path) -> None:
    params = [sampling(i) for i in range(len(PROMPTS))]
    with LLM(str(tiny_llama), num_kv_blocks=1000, num_threads=1) as llm:
        expected = [answer(output) for output in llm.generate(PROMPTS, params)]

    async def work(engine: AsyncLLMEngine) -> None:
        outputs = await asyncio.gather(*map(last, await engine.submit(PROMPTS, params)))
        assert [answer(output) for output in outputs] == expected
        for output in outputs:
            metrics = output.metrics
            assert min(metrics.queue_time, metrics.prefill_time, metrics.decode_time) >= 0
            assert 0 < metrics.queue_time + metrics.prefill_time + metrics.decode_time < 60
            assert metrics.num_preemptions == 0
        assert (await engine.stats())["num_generated_tokens"] >= sum(
            len(choice.token_ids) for output in outputs for choice in output.outputs
        )

    run(tiny_llama, work)


def test_preemptions_are_counted_even_where_a_stop_string_ends_it(slow_llama: Path) -> None:
    """There is no room for both requests: one is preempted. The front-end ends them before the engine does."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": [20 + i] * 30} for i in range(2)]
    with LLM(str(slow_llama), num_kv_blocks=16, num_threads=1) as llm:
        expected = llm.generate(prompts, params)
    preempted = max(expected, key=lambda output: output.metrics.num_preemptions)
    assert preempted.metrics.num_preemptions > 0
    end = preempted.outputs[0].text[-8:]
    assert preempted.outputs[0].text.find(end) > 60
    stopping = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, stop=[end])

    async def work(engine: AsyncLLMEngine) -> None:
        outputs = await asyncio.gather(*map(last, await engine.submit(prompts, stopping)))
        output = outputs[expected.index(preempted)]
        assert output.outputs[0].stop_reason == end
        assert output.metrics.num_preemptions == preempted.metrics.num_preemptions

    run(slow_llama, work, num_kv_blocks=16)


def test_generate_ends_the_request_when_it_is_left(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        async for output in engine.generate("the quick brown fox", LONG, request_id="mine"):
            assert output.request_id == "mine"
            if len(output.outputs[0].token_ids) >= 3:
                break
        await until(lambda: engine.num_unfinished_requests == 0)
        assert output.outputs[0].finish_reason == "abort"

    run(slow_llama, work)


def test_abort_gives_what_there_is(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("a single step", SamplingParams(n=2, max_tokens=200, ignore_eos=True))
        async for output in stream:
            count = len(output.outputs[0].token_ids)
            if count >= 5:
                stream.abort()
                stream.abort()
                break
        output = await anext(stream)
        assert output.finished
        assert [choice.finish_reason for choice in output.outputs] == ["abort", "abort"]
        assert len(output.outputs[0].token_ids) == count
        assert output.metrics.decode_time > 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(slow_llama, work)


def test_an_id_may_be_used_again(slow_llama: Path) -> None:
    """What is left of the first request of that id does nothing to the second."""

    async def work(engine: AsyncLLMEngine) -> None:
        (first,) = await engine.submit("one", SHORT, request_ids=["mine"])
        async with first:
            await last(first)
            (second,) = await engine.submit("two", LONG, request_ids=["mine"])
        first.abort()
        del first
        gc.collect()
        assert len((await last(second)).outputs[0].token_ids) == 200

    run(slow_llama, work)


def test_disconnects_leave_nothing(slow_llama: Path) -> None:
    """500 readers go away, each in one of five ways, at any moment."""

    async def leave(engine: AsyncLLMEngine, index: int) -> None:
        params = SamplingParams(max_tokens=100, ignore_eos=True, n=1 + index % 2, prompt_logprobs=0)
        (stream,) = await engine.submit(PROMPTS[index % 12], params)
        for _ in range(index % 3):
            await anext(stream)
        match index % 5:
            case 0:
                stream.abort()
            case 1:
                async with stream:
                    await anext(stream)
            case 2:
                reader = asyncio.create_task(read_in_context(stream))
                await asyncio.sleep(0.001 * (index % 7))
                reader.cancel()
            case 3:
                async for _ in stream:
                    break
            case 4:
                engine._dispatcher.abort(stream.request_id)
        del stream

    async def read_in_context(stream: Any) -> None:
        async with stream:
            await last(stream)

    async def work(engine: AsyncLLMEngine) -> None:
        for wave in range(10):
            await asyncio.gather(*(leave(engine, 50 * wave + i) for i in range(50)))
        gc.collect()
        await until(lambda: engine.num_unfinished_requests == 0, seconds=5)
        await check_idle(engine)
        assert (await engine.stats())["num_steps"] > 0

    run(slow_llama, work)


def test_a_slow_reader_slows_nobody_and_misses_nothing(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        slow, *others = await engine.submit(PROMPTS[:4], LONG)
        first = await anext(slow)
        await asyncio.gather(*map(last, others))
        await until(lambda: first.finished)
        rest = [output async for output in slow]
        assert len(rest) == 1
        assert len(rest[0].outputs[0].token_ids) == 200

    run(slow_llama, work)


def test_a_full_queue_refuses_all_of_a_call(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        with pytest.raises(RequestError, match="6 sequences in one call; at most 5 may be unfinished"):
            await engine.submit(PROMPTS[:6], SHORT)
        with pytest.raises(RequestError, match="6 sequences in one call"):  # before any prompt is looked at
            await engine.submit([""] * 3, SamplingParams(n=2))
        running = await engine.submit(PROMPTS[:3], LONG)
        two = SamplingParams(n=2, max_tokens=200, ignore_eos=True)
        with pytest.raises(QueueFullError, match="3 sequences are unfinished; at most 5 may be") as refused:
            await engine.submit(["one", "more"], two)
        assert refused.value.retry_after >= 1
        assert engine.num_unfinished_requests == 3
        more = await engine.submit("one", two)
        for stream in [*running, *more]:
            stream.abort()
        await asyncio.gather(*map(last, await engine.submit(PROMPTS[:5], SHORT)))

    run(slow_llama, work, max_num_seqs=2, max_waiting=3)


def test_bad_requests_are_refused_before_any_is_queued(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("fine", LONG, request_ids=["mine"])
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: engine.submit(["fine", ""], SHORT), "the prompt is empty"),
            (lambda: engine.submit(["a" * 5000], SHORT), "the context holds 256"),
            (lambda: engine.submit(["fine"], [SHORT, SHORT]), "2 params for 1 prompts"),
            (lambda: engine.submit(["fine"], SHORT, request_ids=["a", "b"]), "2 request_ids for 1 prompts"),
            (lambda: engine.submit(["a", "b"], SHORT, request_ids=["mine", "b"]), "'mine' belongs to an unfinished"),
            (lambda: engine.submit(["a", "b"], SHORT, request_ids=["x", "x"]), "'x' belongs to an unfinished"),
            (lambda: engine.submit("a", SHORT, priority=2**63), "priority: must be"),
            (lambda: engine.submit({"prompt": "a", "cache_salt": "\udc00"}, SHORT), "cache_salt: it holds a lone"),
            (lambda: engine.submit("a", BeamSearchParams(beam_width=2)), "beam search is not served"),
            (lambda: engine.submit(3, SHORT), "prompts=3: expected"),
        ]
        for call, message in calls:
            with pytest.raises(RequestError, match=message):
                await call()
        assert engine.num_unfinished_requests == 1
        stream.abort()

    run(slow_llama, work)


def test_stats_and_snapshot_name_the_requests(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit(
            "the fox", SamplingParams(n=2, max_tokens=200, ignore_eos=True), request_ids=["a"]
        )
        await anext(stream)
        await anext(stream)
        snapshot, stats = await asyncio.gather(engine.kv_snapshot(), engine.stats())
        assert sorted((s.request_id, s.choice) for s in snapshot.sequences) == [("a", 0), ("a", 1)]
        assert (stats["num_running"], stats["num_unfinished_requests"], stats["engine_ready"]) == (2, 1, 1)
        stream.abort()

    run(slow_llama, work)


def test_drain_lets_finish_what_can(slow_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        quick, endless = await engine.submit(PROMPTS[:2], [SHORT, LONG])
        await engine.drain(0.1)
        with pytest.raises(QueueFullError, match="takes no more requests"):
            await engine.submit("late", SHORT)
        assert (await last(quick)).outputs[0].finish_reason == "length"
        await engine.close()
        assert (await last(endless)).outputs[0].finish_reason == "abort"
        with pytest.raises(QueueFullError, match="the engine is closed"):
            await engine.submit("too late", SHORT)

    run(slow_llama, work)


def test_a_model_may_take_long_to_fetch(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine process waits for that, and would be taken to hang."""

    def fetch(reference: str) -> Path:
        assert reference == "somebody/model"
        time.sleep(1.5)
        return tiny_llama

    monkeypatch.setattr(async_llm_engine, "resolve_model", fetch)

    async def work(engine: AsyncLLMEngine) -> None:
        assert engine.health.num_restarts == 0
        assert (await last((await engine.submit("the fox", SHORT))[0])).error is None

    run(Path("somebody/model"), work, hang_timeout=0.7)


def test_retry_after_is_by_what_happens_now(slow_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by requests that finished an hour ago."""

    async def work(engine: AsyncLLMEngine) -> None:
        for _ in range(3):
            await asyncio.gather(*map(last, await engine.submit(PROMPTS[:4], SHORT)))
        monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600))
        streams = await engine.submit(PROMPTS[:4], LONG)
        with pytest.raises(QueueFullError) as refused:
            await engine.submit("one", SHORT)
        assert refused.value.retry_after == 1
        monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3620))
        with pytest.raises(QueueFullError) as refused:  # none has finished in 20 seconds
            await engine.submit("one", SHORT)
        assert 20 <= refused.value.retry_after <= 22
        for stream in streams:
            stream.abort()

    run(slow_llama, work, max_num_seqs=2, max_waiting=2)


@pytest.mark.parametrize(
    ("model", "config", "error", "message"),
    [
        ("nowhere/at/all", {}, ModelError, "not found"),
        (None, {"max_model_len": 10**6}, ConfigError, "the model was made for at most 256 tokens"),
        (None, {"backend": "cpu", "dtype": "float32"}, ConfigError, "computes in bfloat16"),
    ],
)
def test_start_raises_what_llm_raises(
    tiny_llama: Path, model: str | None, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(AsyncLLMEngine.start(EngineConfig(model or str(tiny_llama), **config)))
