"""Engines that die, hang, or are killed by a request: nothing is lost, and each answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLMEngine, OctavoError, SamplingParams
from octavo.engine import supervisor
from octavo.engine.life import vitals
from tests.engine.async_helpers import answer, last, run, until
from tests.engine.failing_engine import FAULTS, POISON, faulty

STREAMS = 32
PROMPTS: list[Any] = [f"the quick brown fox number {i}" for i in range(STREAMS)]
POISONED = {"prompt_token_ids": [40, POISON, 41]}


def sampling(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if index % 4 == 0 else 1.0,
        seed=index,
        n=1 + (index % 5 == 0),
        logprobs=2 if index % 2 else None,
        prompt_logprobs=1 if index % 3 == 0 else None,
        max_tokens=150 + index,
        min_tokens=100,
        stop=["e"] if index % 7 == 0 else [],
        frequency_penalty=0.5 if index % 6 == 0 else 0.0,
        ignore_eos=True,
    )


PARAMS = [sampling(i) for i in range(STREAMS)]


def undisturbed(model: Path, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    with LLM(str(model), num_kv_blocks=1000, num_threads=1) as llm:
        return [answer(output) for output in llm.generate(prompts, params)]


async def watch_health(engine: AsyncLLMEngine) -> None:
    """Never does an engine that is dead or stopped count as ready."""
    while True:
        pid = engine.health.pid
        down = pid is not None and vitals(pid).state in "ZXT"
        health = engine.health
        assert health.alive
        if down and health.pid == pid:
            assert not health.ready, health
            assert health.reason != "the engine is ready"
        await asyncio.sleep(0.001)


async def kill_ten_times(engine: AsyncLLMEngine, signals: list[signal.Signals], tokens_between: int) -> None:
    outputs = engine._dispatcher.outputs
    for number in signals:
        goal = outputs.num_generated_tokens + tokens_between
        await until(lambda goal=goal: outputs.num_generated_tokens >= goal)
        restarts, pid = engine.health.num_restarts, engine.health.pid
        assert pid is not None
        os.kill(pid, number)
        await until(lambda pid=pid: vitals(pid).state in "ZXT")
        assert not engine.health.ready
        await until(lambda restarts=restarts: engine.health.num_restarts > restarts and engine.health.ready)


@pytest.mark.slow
def test_kills_and_stops_under_many_streams(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.005)
    expected = undisturbed(model, PROMPTS, PARAMS)
    total = sum(len(choice[2]) for _, _, _, choices, _ in expected for choice in choices)

    async def work(engine: AsyncLLMEngine) -> None:
        watcher = asyncio.create_task(watch_health(engine))
        readers = [asyncio.create_task(last(stream)) for stream in await engine.submit(PROMPTS, PARAMS)]
        signals = [signal.SIGKILL, signal.SIGSTOP] * 5
        await kill_ten_times(engine, signals, total // 14)
        outputs = await asyncio.gather(*readers)
        assert engine.health.num_restarts == 10
        assert [answer(output) for output in outputs] == expected
        for output in outputs:
            assert output.metrics.decode_time > 2 > output.metrics.prefill_time  # of the first life alone
        watcher.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watcher

    run(model, work, hang_timeout=0.8)


def test_a_death_in_the_middle_of_prompts(tiny_llama: Path, tmp_path: Path) -> None:
    """Logprobs of a prompt's first chunks have come; the next life gives them again, and they are not shown twice."""
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.02)
    prompts = [{"prompt_token_ids": [20 + (i * j) % 250 for j in range(150)]} for i in range(1, 4)]
    params = [SamplingParams(prompt_logprobs=2, max_tokens=5, n=2, seed=3, ignore_eos=True)] * 3
    expected = undisturbed(tiny_llama, prompts, params)

    async def work(engine: AsyncLLMEngine) -> None:
        streams = await engine.submit(prompts, params)
        output = await anext(streams[0])
        assert 1 < len(output.prompt_logprobs or []) < 150
        assert engine.health.pid is not None
        os.kill(engine.health.pid, signal.SIGKILL)
        outputs = await asyncio.gather(*map(last, streams))
        assert [answer(output) for output in outputs] == expected
        assert engine.health.num_restarts == 1

    run(model, work, max_num_batched_tokens=32)


def test_a_kernel_that_does_not_tell_is_asked(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such system call")

    monkeypatch.setattr(os, "pidfd_open", not_here)
    expected = undisturbed(tiny_llama, PROMPTS[:2], PARAMS[:2])

    async def work(engine: AsyncLLMEngine) -> None:
        assert engine.health.pid is not None
        os.kill(engine.health.pid, signal.SIGKILL)
        streams = await engine.submit(PROMPTS[:2], PARAMS[:2])
        assert [answer(await last(stream)) for stream in streams] == expected
        assert engine.health.num_restarts == 1

    run(tiny_llama, work)


def test_requests_that_come_while_there_is_no_engine_wait(tiny_llama: Path) -> None:
    expected = undisturbed(tiny_llama, PROMPTS[:2], PARAMS[:2])

    async def work(engine: AsyncLLMEngine) -> None:
        assert engine.health.pid is not None
        os.kill(engine.health.pid, signal.SIGKILL)
        await until(lambda: engine.health.pid is None or engine.health.num_restarts == 1)
        assert (await engine.stats())["engine_ready"] == 0
        with pytest.raises(OctavoError, match="no KV pool to look at"):
            await engine.kv_snapshot()
        first, second, aborted = await engine.submit([*PROMPTS[:2], "x"], [*PARAMS[:2], PARAMS[2]])
        aborted.abort()
        assert [answer(await last(stream)) for stream in (first, second)] == expected

    run(tiny_llama, work)


@pytest.mark.parametrize(
    ("faults", "count", "reason"),
    [
        ({"poison": "die"}, 1, "killed by signal 11"),
        ({"poison": "die", "poison_length": 30, "step_seconds": 0.02}, 2, "killed by signal 11"),
        ({"poison": "raise"}, 1, "exit code 1"),
        ({"poison": "wait"}, 1, "it hung: no sign of progress"),
        ({"poison_taken_in": "die"}, 1, "killed by signal 11"),
    ],
)
def test_poison_is_found_and_the_innocent_finish(
    tiny_llama: Path, tmp_path: Path, faults: dict[str, Any], count: int, reason: str
) -> None:
    model = faulty(tiny_llama, tmp_path / "model", **faults)
    expected = undisturbed(tiny_llama, PROMPTS[:6], PARAMS[:6])
    fatal = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with LLM(str(tiny_llama), num_kv_blocks=1000, num_threads=1) as llm:
        harmless = llm.generate(POISONED, fatal)[0].outputs[0].token_ids
    most = max(0, faults.get("poison_length", 0) - len(POISONED["prompt_token_ids"]))

    async def work(engine: AsyncLLMEngine) -> None:
        prompts = [*PROMPTS[:3], *[POISONED] * count, *PROMPTS[3:6]]
        params = [*PARAMS[:3], *[fatal] * count, *PARAMS[3:6]]
        streams = await engine.submit(prompts, params)
        outputs = await asyncio.gather(*map(last, streams))
        poisoned = outputs[3 : 3 + count]
        assert [answer(output) for output in outputs[:3] + outputs[3 + count :]] == expected
        for output in poisoned:
            assert output.outputs[0].finish_reason == "error"
            assert output.error is not None
            assert output.error.startswith("the engine died whenever it computed this request")
            assert reason in output.error
            token_ids = output.outputs[0].token_ids  # up to the poison, which came when the last had arrived
            assert token_ids == harmless[:most]
        assert 2 + count <= engine.health.num_restarts <= 3 + count
        await until(lambda: engine.health.ready)
        assert (await last((await engine.submit("still here", PARAMS[1]))[0])).error is None

    run(model, work, hang_timeout=0.8)


def test_a_long_step_is_no_hang(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", burn_seconds=1.5)

    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("the fox", SamplingParams(max_tokens=2, ignore_eos=True))
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(last(stream))
            while not reading.done():
                assert engine.health.ready
                await asyncio.sleep(0.01)
        assert engine.health.num_restarts == 0

    run(model, work, hang_timeout=0.7)


def test_a_step_that_never_ends_is_one_even_if_it_computes(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", burn_seconds=60)

    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("the fox", SamplingParams(max_tokens=2, ignore_eos=True))
        output = await last(stream)
        assert output.error is not None
        assert "it hung: one step has taken more than 0.5 s" in output.error
        assert engine.health.num_restarts == 3

    run(model, work, options={"step_timeout": 0.5}, hang_timeout=3.0)


def test_what_never_ends_between_two_steps_is_a_hang(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", poison_taken_in="burn")

    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit(POISONED, PARAMS[0])
        output = await last(stream)
        assert output.error is not None
        assert "it hung: one step has taken more than 0.5 s" in output.error
        assert engine.health.num_restarts == 3

    run(model, work, options={"step_timeout": 0.5}, hang_timeout=3.0)


def test_poison_that_reports_its_prompt_is_found(tiny_llama: Path, tmp_path: Path) -> None:
    """Each engine dies in the prompt's last chunk, and has reported the first ones by then."""
    model = faulty(tiny_llama, tmp_path / "model", poison="die", poison_start=12, step_seconds=0.02)
    poisoned = {"prompt_token_ids": [40, POISON, *range(41, 53)]}

    async def work(engine: AsyncLLMEngine) -> None:
        params = SamplingParams(prompt_logprobs=0, max_tokens=30, ignore_eos=True)
        (stream,) = await engine.submit(poisoned, params)
        output = await last(stream)
        assert output.error is not None
        assert 1 < len(output.prompt_logprobs or []) <= 13
        assert engine.health.num_restarts == 3

    run(model, work, max_num_batched_tokens=4)


def test_the_time_that_loading_takes_is_no_merit(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that end as soon as they are ready are given up, however long they have loaded."""
    monkeypatch.setattr(supervisor, "LASTING", 0.8)
    model = faulty(tiny_llama, tmp_path / "model", load_seconds=1.0)

    async def work(engine: AsyncLLMEngine) -> None:
        for deaths in range(3):
            await until(lambda deaths=deaths: engine.health.ready and engine.health.num_restarts == deaths)
            await asyncio.sleep(0.2)
            assert engine.health.pid is not None
            os.kill(engine.health.pid, signal.SIGKILL)
        error = await asyncio.wait_for(engine.failure(), 5)
        assert "the engine died 3 times in a row without having done anything" in str(error)

    run(model, work, options={"max_failures": 3, "restart_delay": 0.01}, hang_timeout=1.0)


def test_an_idle_engine_is_no_hang_but_a_stopped_one_is(tiny_llama: Path) -> None:
    async def work(engine: AsyncLLMEngine) -> None:
        pid = engine.health.pid
        await asyncio.sleep(1.5)
        assert (engine.health.pid, engine.health.ready) == (pid, True)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: vitals(pid).stopped)
        assert (engine.health.ready, engine.health.reason) == (False, "the engine process is stopped")
        await until(lambda: engine.health.ready and engine.health.pid != pid)

    run(tiny_llama, work, hang_timeout=0.7)


def test_an_engine_that_cannot_be_kept_up_is_given_up(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.01)

    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("the fox", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        (model / FAULTS).write_text(json.dumps({"dies_at_load": True}))
        assert engine.health.pid is not None
        os.kill(engine.health.pid, signal.SIGKILL)
        start = time.monotonic()
        error = await engine.failure()
        assert time.monotonic() - start < 20
        assert "the engine died 3 times in a row without having done anything" in str(error)
        output = await last(stream)
        assert (output.outputs[0].finish_reason, output.error) == ("error", str(error))
        assert len(output.outputs[0].token_ids) >= 1
        assert (engine.health.alive, engine.health.ready, engine.health.reason) == (False, False, str(error))
        with pytest.raises(OctavoError, match="3 times in a row"):
            await engine.submit("too late", PARAMS[0])

    run(model, work, options={"max_failures": 3, "restart_delay": 0.01})


def test_one_token_a_life_is_not_enough_for_ever(tiny_llama: Path, tmp_path: Path) -> None:
    """Each life brings a token and dies: the request is no suspect, since it gets on, but there has to be an end."""
    model = faulty(tiny_llama, tmp_path / "model", dies_after=1, step_seconds=0.1)

    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("the fox", SamplingParams(max_tokens=200, ignore_eos=True))
        error = await asyncio.wait_for(engine.failure(), 30)
        assert "the engine died 4 times in a row each time before it had done 64 tokens" in str(error)
        output = await last(stream)
        assert (output.outputs[0].finish_reason, output.error) == ("error", str(error))
        assert 1 <= len(output.outputs[0].token_ids) <= 4

    run(model, work, options={"max_poor_lives": 4})


def test_lives_that_bring_much_may_be_many(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", dies_after=supervisor.RICH + 10, step_seconds=0.001)
    expected = undisturbed(tiny_llama, ["the fox"], [SamplingParams(seed=1, max_tokens=240, ignore_eos=True)])

    async def work(engine: AsyncLLMEngine) -> None:
        (stream,) = await engine.submit("the fox", SamplingParams(seed=1, max_tokens=240, ignore_eos=True))
        assert [answer(await last(stream))] == expected
        assert engine.health.num_restarts == 3

    run(model, work, options={"max_poor_lives": 2})


@contextlib.contextmanager
def no_more_files() -> Iterator[Callable[[], None]]:
    """This process can open none; to be called again when some may have been closed."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    held = []

    def hold() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))

    try:
        hold()
        yield hold
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in held:
            os.close(file)


def test_no_more_files_are_a_pause(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is the engine given up at once, nor is anything left of the starts that failed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = undisturbed(tiny_llama, PROMPTS[:2], PARAMS[:2])

    async def work(engine: AsyncLLMEngine) -> None:
        assert engine.health.pid is not None
        with no_more_files() as hold:
            os.kill(engine.health.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                while engine.health.num_restarts < 3:
                    hold()
                    await asyncio.sleep(0.001)
            assert engine.health.alive
            assert "Too many open files" in engine.health.reason
        streams = await engine.submit(PROMPTS[:2], PARAMS[:2])
        assert [answer(await last(stream)) for stream in streams] == expected

    run(tiny_llama, work, options={"restart_delay": 0.05})
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_dies_at_its_first_start_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", dies_at_load=True)

    async def work(engine: AsyncLLMEngine) -> None:
        raise AssertionError("it should not start")

    with pytest.raises(OctavoError, match="the engine process ended as it loaded the model: killed by signal 9"):
        run(model, work)
