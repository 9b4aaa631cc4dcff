"""One model over several workers under a real Ray: what it computes, what it refuses, and what happens when one dies.

One cluster with more processors in its books than this machine has, so that four workers find room.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from octavo import LLM, AsyncLLMEngine, SamplingParams
from octavo.config import engine_config
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.executor.ray import RayExecutor, WorkerLostError
from octavo.outputs import RequestOutput
from tests.tiny import make_llama

CPUS = 8
PROMPTS: list[Any] = [{"prompt_token_ids": [5 + i, 9, 20, 33, 7, 60 + i] * 4} for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 1 << 22, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address."""
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


def over_ray(model: Path, cluster: str, size: int, stages: int, **options: Any) -> LLM:
    return LLM(
        str(model), tensor_parallel_size=size, pipeline_parallel_size=stages, distributed_executor_backend="ray",
        ray_address=cluster, **{**SMALL, **options},
    )  # fmt: skip


def executor_of(llm: LLM) -> RayExecutor:
    executor = llm.engine._core.executor
    assert isinstance(executor, RayExecutor)
    return executor


def results(outputs: list[RequestOutput]) -> list[Any]:
    """Token ids and logprobs."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def worker_pids() -> set[int]:
    """Of the workers of this process's cluster: those of others on this machine are not ours to kill."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
                ours = command.startswith(b"ray::RayWorker") and os.getpid() in ancestors(int(process.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
            if ours:
                found.add(int(process.name))
    return found


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def assert_all_end() -> None:
    """Ray ends a driver's workers a little after it."""
    deadline = time.monotonic() + 10
    while worker_pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker_pids()


def run_to_the_end(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


@pytest.mark.parametrize(("size", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_workers_say_together_what_one_says(tiny: Path, cluster: str, size: int, stages: int) -> None:
    """In float32, where nothing but the order of additions differs."""
    exact: dict[str, Any] = {"backend": "torch", "dtype": "float32"}
    with LLM(str(tiny), **SMALL, **exact) as llm:
        alone = llm.generate(PROMPTS, GREEDY)
    with over_ray(tiny, cluster, size, stages, **exact) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        report = str(llm.engine.boot_report)
        traffic = executor_of(llm).traffic()
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    for one, other in zip(alone, together, strict=True):
        assert other.outputs[0].cumulative_logprob == pytest.approx(one.outputs[0].cumulative_logprob, abs=1e-3)
    assert all(f"worker {i} (stage {i // size}, rank {i % size})" in report for i in range(size * stages))
    assert [worker.num_messages > 0 for worker in traffic] == [size > 1 or i < stages - 1 for i in range(size * stages)]
    if stages == 1 and size == 1:
        assert results(together) == results(alone)


def test_a_pipeline_keeps_the_bits(tiny: Path, cluster: str) -> None:
    """On the cpu backend, with prompts in chunks, preemption in a small pool, and three steps in flight."""
    tight = {"num_kv_blocks": 7, "kv_cache_memory_bytes": None, "max_num_seqs": 4}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, logprobs=2, prompt_logprobs=1, ignore_eos=True, n=2)
    with LLM(str(tiny), **{**SMALL, **tight}) as llm:
        alone = results(llm.generate(PROMPTS, params))
    with over_ray(tiny, cluster, 1, 3, **tight) as llm:
        together = results(llm.generate(PROMPTS, params))
        assert llm.stats()["num_preemptions"] > 0
    assert together == alone


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_smollm2_divided_says_the_same_wherever_it_is_clear(
    smollm2_path: Path, cluster: str, size: int, stages: int
) -> None:
    """Logprobs move by the rounding of partial sums; no token may differ whose lead is twice as much as any moved."""
    text = (
        "The capital of France is Paris, and the capital of Italy is Rome. Rivers flow from mountains to the sea, where"
    )
    scored = SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=4)
    with LLM(str(smollm2_path), **{**SMALL, "kv_cache_memory_bytes": 1 << 26}) as llm:
        alone = llm.generate([text], scored)[0]
        whole = llm.engine.boot_report.memory.weight_bytes
    with over_ray(smollm2_path, cluster, size, stages, kv_cache_memory_bytes=1 << 26) as llm:
        together = llm.generate([text], scored)[0]
        again = llm.generate([text], scored)[0]
        report = llm.engine.boot_report
    assert results([again]) == results([together])  # the same degree, the same bits; now from the prefix cache
    if size == 1:
        assert results([together]) == results([alone])
        assert together.prompt_logprobs == alone.prompt_logprobs
        return
    moved = [
        abs(one[token].logprob - other[token].logprob)
        for one, other in zip(alone.prompt_logprobs[1:], together.prompt_logprobs[1:], strict=True)
        for token in one.keys() & other.keys()
    ]
    bound = 2 * max(moved)
    assert 0 < bound < 1
    assert sum(moved) / len(moved) < 0.1  # of which int8 activations are the larger part
    clear = 0
    for one, other in zip(alone.prompt_logprobs[1:], together.prompt_logprobs[1:], strict=True):
        first, second = sorted(one, key=lambda token: one[token].rank)[:2]
        if one[first].logprob - one[second].logprob > bound:
            clear += 1
            assert other[first].rank == 1
    assert clear > len(moved) / 4 / 2  # at most four tokens a position
    bytes_of = [int(line.rpartition("weights ")[2].split()[0]) for line in report.workers]
    assert len(bytes_of) == size * stages
    if stages == 1:  # else the tied embedding is in two stages
        assert sum(bytes_of) == pytest.approx(whole, rel=0.01)


def test_what_finds_no_room_is_refused_with_the_numbers(tiny: Path, cluster: str) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"2 workers of 5 CPUs each need 10, and the cluster has 8"):
        over_ray(tiny, cluster, 2, 1, num_threads=5)
    assert time.monotonic() - start < 5


def test_what_finds_no_free_room_is_refused_too(tiny: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with over_ray(tiny, cluster, 1, 1, num_threads=5):
        monkeypatch.setattr("octavo.executor.ray.ROOM_PATIENCE", 0.5)
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r"2 workers of 2 CPUs each need 4, and the cluster has 3 free of 8"):
            over_ray(tiny, cluster, 2, 1, num_threads=2)
        assert 0.5 < time.monotonic() - start < 5


def test_workers_come_into_the_room_of_those_before(tiny: Path, cluster: str) -> None:
    """Ray gives it back a little after they are gone."""
    for _ in range(2):
        with over_ray(tiny, cluster, 1, 1, num_threads=CPUS) as llm:
            assert len(llm.generate(PROMPTS[:1], GREEDY)) == 1


def test_an_error_names_the_worker_and_its_host(tiny: Path, cluster: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker 0 \(stage 0, rank 0\) on .*: dtype='float32': backend='cpu'"):
        over_ray(tiny, cluster, 1, 1, dtype="float32", backend="cpu")
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=5: a width of 96 has 3 units of 32"):
        over_ray(tiny, cluster, 5, 1)  # nobody had to be started for that
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(ModelError):
        over_ray(broken, cluster, 1, 1)


def test_a_lost_worker_is_noticed_within_seconds(tiny: Path, cluster: str) -> None:
    with over_ray(tiny, cluster, 2, 1) as llm:
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(i), prompt, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(5):
            llm.engine.step()
        os.kill(min(worker_pids()), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"worker \d \(stage 0, rank \d\) on .* is gone"):
            run_to_the_end(llm)
        assert time.monotonic() - start < 5
        with pytest.raises(OctavoError, match=r"cannot go on after: worker \d .* is gone"):
            llm.engine.step()
    assert_all_end()


@pytest.mark.slow
def test_ten_killed_workers_fail_no_request(tiny: Path, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine process ends with its workers; the front-end starts another, and tells it what was unfinished."""
    recoveries = asyncio.run(_chaos(tiny, cluster, kills=10))
    with capsys.disabled():
        print("seconds from kill to ready:", " ".join(f"{seconds:.1f}" for seconds in recoveries))
    assert max(recoveries) < 60
    assert_all_end()


async def _chaos(model: Path, cluster: str, *, kills: int) -> list[float]:
    config = engine_config(
        str(model),
        {**SMALL, "tensor_parallel_size": 2, "distributed_executor_backend": "ray", "ray_address": cluster},
    )
    params = SamplingParams(temperature=0, max_tokens=150, logprobs=1, ignore_eos=True)
    engine = await AsyncLLMEngine.start(config)
    try:

        async def stream(prompt: Any) -> Any:
            outputs = [output async for output in engine.generate(prompt, params)]
            assert outputs[-1].finished
            return results(outputs[-1:])

        async def all_streams() -> list[Any]:
            return await asyncio.gather(*(stream(prompt) for prompt in PROMPTS))

        undisturbed = await all_streams()
        recoveries = []
        for kill in range(kills):
            running = asyncio.create_task(all_streams())
            await asyncio.sleep(0.05 * (kill % 4))
            os.kill(sorted(worker_pids())[kill % 2], signal.SIGKILL)
            start = time.monotonic()
            while engine.health.ready:
                await asyncio.sleep(0.01)
            while not engine.health.ready:
                assert engine.health.alive
                await asyncio.sleep(0.01)
            recoveries.append(time.monotonic() - start)
            assert await running == undisturbed
        return recoveries
    finally:
        await engine.close()
