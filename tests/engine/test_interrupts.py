"""Ctrl-C at any moment, and steps that fail: nothing is torn, and the engine goes on."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from octavo import LLM, LLMEngine, SamplingParams
from octavo.engine.interrupts import deferred_interrupt

PROMPTS = ["the quick brown fox", "a single step", "numbers such as 1 2 3"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=2, prompt_logprobs=0)
FILES = ("llm_engine.py", "core.py", "outputs.py", "scheduler.py", "block_manager.py", "request_slots.py", "llm.py")


@pytest.fixture
def llm(tiny_llama: Path):
    with LLM(str(tiny_llama), num_kv_blocks=16, num_threads=1) as llm:
        yield llm


class PressAt:
    """Raises SIGINT as the n-th traced line of the engine's own files begins."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if "octavo" not in path or not path.endswith(FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def check_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_held_tokens"]) == (0, 0, 0)
    assert stats["num_used_blocks"] == 0
    assert llm.engine._outputs._live == {}
    assert llm.engine._seq_ids == {}


@pytest.mark.slow
def test_ctrl_c_at_any_line_of_generate(llm: LLM) -> None:
    expected = [output.outputs[1].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    presses = 0
    for line in range(1, 4000, 37):
        sys.settrace(PressAt(line))
        try:
            llm.generate(PROMPTS, PARAMS)
        except KeyboardInterrupt:
            presses += 1
        finally:
            sys.settrace(None)
        check_idle(llm)
        assert [output.outputs[1].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert presses > 30


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_callers_own_handler_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_no_handler() -> None:
    handlers = []

    def work() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_step_that_fails_may_be_run_again(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the request is lost by it, prompt logprobs neither."""
    engine = LLMEngine.from_options(str(tiny_llama), num_kv_blocks=16, num_threads=1, max_num_batched_tokens=4)
    prompt = {"prompt_token_ids": list(range(5, 15))}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    failures = 0

    def run() -> Any:
        nonlocal failures
        engine.add_request("x", prompt, params)
        while engine.has_unfinished_requests:
            try:
                for output in engine.step():
                    last = output
            except MemoryError:
                failures += 1
        return last

    expected = run()
    backend = type(engine._core.executor._worker._runner.backend)
    execute, calls = backend.execute, []

    def fails_every_other_time(self: Any, *arguments: Any) -> Any:
        calls.append(None)
        if len(calls) % 2:
            raise MemoryError
        return execute(self, *arguments)

    monkeypatch.setattr(backend, "execute", fails_every_other_time)
    found = run()
    assert failures == 5  # three chunks of the prompt, and two more tokens
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    engine.close()
