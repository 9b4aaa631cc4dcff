"""LLMEngine step by step: adding while others run, aborting at any moment, closing."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import ConfigError, LLMEngine, OctavoError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(tiny_llama: Path):
    engine = LLMEngine.from_options(str(tiny_llama), num_kv_blocks=32, num_threads=1)
    yield engine
    engine.close()


def drain(engine: LLMEngine) -> dict[str, object]:
    finished = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def test_a_request_may_join_at_any_step(engine: LLMEngine) -> None:
    engine.add_request("first", "the quick brown fox", GREEDY)
    lengths = []
    for _ in range(3):
        (output,) = engine.step()
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == [1, 2, 3]
    engine.add_request("second", "a single step", GREEDY)
    moved = engine.step()
    assert [output.request_id for output in moved] == ["first", "second"]
    assert set(drain(engine)) == {"first", "second"}
    assert engine.step() == []


def test_text_grows_by_whole_characters(engine: LLMEngine) -> None:
    engine.add_request("x", "the", SamplingParams(temperature=5.0, seed=1, max_tokens=64, ignore_eos=True))
    before = ""
    while engine.has_unfinished_requests:
        for output in engine.step():
            text = output.outputs[0].text
            assert text.startswith(before)
            before = text
    assert before == engine.tokenizer.decode(output.outputs[0].token_ids)


def test_abort_while_running_and_while_waiting(tiny_llama: Path) -> None:
    engine = LLMEngine.from_options(str(tiny_llama), num_kv_blocks=32, max_num_seqs=1, num_threads=1)
    for name in ("runs", "waits", "stays"):
        engine.add_request(name, "the quick brown fox", GREEDY)
    engine.step()
    aborted = engine.abort("runs")
    assert aborted is not None
    assert aborted.finished
    assert aborted.outputs[0].finish_reason == "abort"
    assert len(aborted.outputs[0].token_ids) == 1
    assert engine.abort("waits").outputs[0].token_ids == []
    assert engine.abort("runs") is None
    assert engine.abort("never was") is None
    assert set(drain(engine)) == {"stays"}
    assert engine.stats()["num_used_blocks"] == 0
    engine.close()


def test_ids_of_unfinished_requests_are_taken(engine: LLMEngine) -> None:
    engine.add_request("x", "the", GREEDY)
    with pytest.raises(RequestError, match="request_id='x' belongs to an unfinished request"):
        engine.add_request("x", "the", GREEDY)
    drain(engine)
    engine.add_request("x", "the", GREEDY)
    assert set(drain(engine)) == {"x"}


def test_priority_request_overtakes(tiny_llama: Path) -> None:
    """CASES 31: a later request with priority -100 preempts; the victim comes back before newer ones of its class."""
    engine = LLMEngine.from_options(
        str(tiny_llama), num_kv_blocks=32, max_num_seqs=1, scheduling_policy="priority", num_threads=1
    )
    engine.add_request("victim", "the quick brown fox", GREEDY)
    engine.step()
    engine.add_request("newer", "the quick brown fox", GREEDY)
    engine.add_request("urgent", "the quick brown fox", GREEDY, priority=-100)
    finished = drain(engine)
    assert list(finished) == ["urgent", "victim", "newer"]
    assert finished["victim"].metrics.num_preemptions == 1
    texts = {output.outputs[0].text for output in finished.values()}
    assert len(texts) == 1
    engine.close()


def test_closed_engine_says_so(engine: LLMEngine) -> None:
    engine.add_request("x", "the", GREEDY)
    engine.close()
    assert not engine.has_unfinished_requests
    with pytest.raises(OctavoError, match="the engine is closed"):
        engine.add_request("y", "the", GREEDY)
    engine.close()


class TestOptions:
    """What cannot be honoured is refused when the engine is made, with the numbers."""

    @pytest.mark.parametrize(("options", "message"), [
        ({"max_model_len": 257}, "max_model_len=257: the model was made for at most 256 tokens"),
        ({"max_model_len": 200, "num_kv_blocks": 10}, r"does not fit into the KV pool of 10 blocks \(160 tokens\)"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes=100: one block of 16 tokens alone takes 4096 bytes"),
        ({"device": "cuda:7"}, "cuda"),
        ({"backend": "cpu", "dtype": "float32"}, "dtype='float32': .* backend='torch'"),
        ({"backend": "cpu", "device": "cuda:0"}, "device='cuda:0': .* backend='torch'"),
        ({"block_size": 8}, "block_size=8: .* multiple of 16"),
        ({"no_such_option": 1}, "unknown option no_such_option"),
    ])  # fmt: skip
    def test_refused(self, tiny_llama: Path, options: dict, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            LLMEngine.from_options(str(tiny_llama), **options)

    def test_small_pool_bounds_the_context(self, tiny_llama: Path) -> None:
        engine = LLMEngine.from_options(str(tiny_llama), num_kv_blocks=3, num_threads=1)
        assert engine.boot_report.memory.max_model_len == 48
        assert engine.boot_report.memory.full_context_requests == 1.0
        with pytest.raises(RequestError, match="the prompt has 48 tokens; the context holds 48"):
            engine.add_request("x", {"prompt_token_ids": [5] * 48}, GREEDY)
        engine.add_request("y", {"prompt_token_ids": [5] * 47}, GREEDY)
        assert len(drain(engine)["y"].outputs[0].token_ids) == 1
        engine.close()

    def test_kv_memory_in_bytes(self, tiny_llama: Path) -> None:
        engine = LLMEngine.from_options(str(tiny_llama), kv_cache_memory_bytes=10 * 4096 + 5, num_threads=1)
        memory = engine.boot_report.memory
        assert memory.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # K and V, layers, KV heads, head size, bfloat16
        assert (memory.num_blocks, memory.kv_bytes) == (10, 10 * 4096)
        engine.close()
