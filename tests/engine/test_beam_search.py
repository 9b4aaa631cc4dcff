"""Beam search on the whole road: transformers' beams with the torch backend in float32; on the cpu backend the beams
that a search outside of the engine finds, bit for bit, whatever the scheduler does on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from octavo import LLM, BeamSearchParams, LLMEngine, RequestError, RequestOutput, SamplingParams
from tests.backends.checkpoints import make
from tests.core.test_beam_search import reference as dense_search
from tests.tiny import make_llama, make_tokenizer

VOCABULARY = 320
ROOMY = {"num_kv_blocks": 256, "num_threads": 1}
EARLY: tuple[Any, ...] = (False, True, "never")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary is the tokeniser's: transformers' logprobs are over all of the model's."""
    return make_llama(tmp_path_factory.mktemp("beams") / "tiny", vocab_size=VOCABULARY, seed=1)


@pytest.fixture(scope="module")
def cpu(model: Path) -> Iterator[LLM]:
    with LLM(str(model), backend="cpu", **ROOMY) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[LLM]:
    with LLM(str(model), backend="torch", dtype="float32", **ROOMY) as llm:
        yield llm


@pytest.fixture(scope="module")
def transformers_model(model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def prompt(length: int, seed: float) -> dict[str, Any]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(3, VOCABULARY) for _ in range(length)]}


def ends(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(3, VOCABULARY), count)


PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 6, 37))]


def ended_by(stops: list[int], **params: Any) -> BeamSearchParams:
    return BeamSearchParams(max_tokens=14, ignore_eos=True, stop_token_ids=tuple(stops), **params)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller can compare: floats too, as they are."""
    return [[(b.token_ids, b.cumulative_logprob, b.score, b.text, b.finish_reason) for b in o.outputs] for o in outputs]


def transformers_beams(
    model: PreTrainedModel, tokens: list[int], params: BeamSearchParams, stops: list[int]
) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=stops or None,
            pad_token_id=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    scores = [0.0] if found.sequences_scores is None else found.sequences_scores.tolist()
    beams = []
    for row, score in zip(found.sequences[:, len(tokens) :].tolist(), scores, strict=True):
        end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
        beams.append((row[: end + 1], score))
    return beams


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("width", "num_stops"), [(2, 60), (3, 80), (4, 90), (6, 0), (8, 25), (24, 30)])
def test_transformers_beams(
    oracle: LLM, transformers_model: LlamaForCausalLM, width: int, num_stops: int, penalty: float, early: Any
) -> None:
    """Sequences and scores; with `num_stops` of 320 tokens that end a beam, most beams end before the length does."""
    stops = ends(num_stops, seed=width)
    params = ended_by(stops, beam_width=width, length_penalty=penalty, early_stopping=early)
    for output in oracle.beam_search(PROMPTS, params):
        expected = transformers_beams(transformers_model, output.prompt_token_ids, params, stops)
        assert [beam.token_ids for beam in output.outputs] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([b.score for b in output.outputs], [s for _, s in expected], rtol=1e-5, atol=1e-5)
        for index, beam in enumerate(output.outputs):
            assert beam.index == index
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] in stops else "length")
            assert beam.score == pytest.approx(beam.cumulative_logprob / len(beam.token_ids) ** penalty, rel=1e-12)
    assert oracle.stats()["num_used_blocks"] == 0


def test_those_cases_are_of_all_kinds(oracle: LLM) -> None:
    """Beams that end early, in the middle and by their length; each rule for when to stop gives other beams."""
    for width, num_stops in ((2, 60), (3, 80), (4, 90)):
        lengths = []
        for early in EARLY:
            params = ended_by(ends(num_stops, seed=width), beam_width=width, early_stopping=early)
            outputs = oracle.beam_search(PROMPTS, params)
            lengths.append([len(beam.token_ids) for output in outputs for beam in output.outputs])
        assert lengths[0] != lengths[1] != lengths[2] != lengths[0]
        assert min(map(min, lengths)) < 3
        assert max(map(max, lengths)) > 9


def test_the_model_s_own_end_token_and_ignoring_it(model: Path, transformers_model: LlamaForCausalLM) -> None:
    """The union of its end tokens and `stop_token_ids` ends a beam; `ignore_eos` leaves the latter."""
    import json
    import shutil

    own = ends(40, seed=9)
    path = model.parent / "ends"
    shutil.copytree(model, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    with LLM(str(path), backend="torch", dtype="float32", **ROOMY) as llm:
        for ignore, stops in ((False, [*own, 5, 0]), (True, [5])):
            params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=ignore, stop_token_ids=[5])
            (output,) = llm.beam_search(prompt(6, 1), params)
            expected = transformers_beams(transformers_model, output.prompt_token_ids, params, stops)
            assert [beam.token_ids for beam in output.outputs] == [tokens for tokens, _ in expected]
            assert any(beam.finish_reason == "stop" for beam in output.outputs) != ignore
            assert all(beam.stop_reason is None for beam in output.outputs)


class Teacher:
    """The engine's logprobs of the next token, each asked for in a request of its own."""

    def __init__(self, llm: LLM, prompt_ids: list[int]) -> None:
        self.llm, self.prompt_ids = llm, prompt_ids
        self.known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def __call__(self, tokens: tuple[int, ...]) -> NDArray[np.float64]:
        if tokens not in self.known:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
            (output,) = self.llm.generate({"prompt_token_ids": [*self.prompt_ids, *tokens]}, params)
            row = np.full(VOCABULARY, -np.inf)
            for token, entry in output.outputs[0].logprobs[0].items():
                row[token] = entry.logprob
            self.known[tokens] = row
        return self.known[tokens]


@pytest.mark.parametrize(("width", "num_stops", "penalty", "early"), [(2, 8, 0.0, "never"), (4, 3, 1.0, False)])
def test_beams_of_the_cpu_backend_bit_for_bit(cpu: LLM, width: int, num_stops: int, penalty: float, early: Any) -> None:
    """As a search over the logprobs of single requests finds them: 20 of each are enough for these widths."""
    stops = ends(num_stops, seed=3)
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=12,
        length_penalty=penalty,
        early_stopping=early,
        ignore_eos=True,
        stop_token_ids=stops,
    )
    for seed, length in enumerate((1, 15, 40)):
        (output,) = cpu.beam_search(prompt(length, seed), params)
        expected = dense_search(Teacher(cpu, output.prompt_token_ids), params, set(stops), 12)
        assert [(beam.score, tuple(beam.token_ids)) for beam in output.outputs] == expected


def test_scores_of_the_cpu_backend_equal_a_float64_recomputation(cpu: LLM, model: Path) -> None:
    """The sum of the prompt logprobs of the same tokens, to the last bit; transformers' in float64, to bfloat16's."""
    exact = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    params = BeamSearchParams(beam_width=5, max_tokens=10, length_penalty=1.5, ignore_eos=True)
    (output,) = cpu.beam_search(prompt(20, 5), params)
    for beam in output.outputs:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        (scored,) = cpu.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=0, prompt_logprobs=0))
        total = 0.0
        for token, entry in zip(tokens[20:], scored.prompt_logprobs[20:], strict=True):
            total += entry[token].logprob
        assert beam.cumulative_logprob == total
        assert beam.score == total / 10**1.5
        with torch.inference_mode():
            rows = exact(torch.tensor([tokens])).logits[0, 19:-1].log_softmax(-1)
        expected = sum(float(rows[i, token]) for i, token in enumerate(beam.token_ids))
        assert beam.cumulative_logprob == pytest.approx(expected, rel=0.03)


PARAMS = [
    BeamSearchParams(beam_width=3, max_tokens=24, stop_token_ids=ends(5, 1)),
    BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True),
    BeamSearchParams(beam_width=2, max_tokens=40, early_stopping="never", length_penalty=0.0),
    BeamSearchParams(beam_width=1, max_tokens=20, ignore_eos=True),
]


@pytest.mark.parametrize("budget", [11, 2048])
@pytest.mark.parametrize("blocks", [16, 256])
@pytest.mark.parametrize("caching", [True, False])
def test_nothing_changes_one_bit(cpu: LLM, model: Path, caching: bool, blocks: int, budget: int) -> None:
    """{cache, none} x {preemption, none} x {chunk sizes}, with searches and plain requests side by side."""
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 33, 9, 20, 41, 16, 2, 30))]
    params = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    sampling = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
    expected = answers([cpu.beam_search(p, own)[0] for p, own in zip(prompts, params, strict=True)])
    plain = cpu.generate(prompt(25, 99), sampling)[0].outputs[0].token_ids
    options: dict[str, Any] = {
        "enable_prefix_caching": caching,
        "num_kv_blocks": blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 8 if blocks == 16 else 64,
        "num_threads": 1,
    }
    with LLM(str(model), backend="cpu", **options) as llm:
        for i in range(4):
            llm.engine.add_request(f"plain {i}", prompt(25, 99), sampling)
        finished: dict[str, RequestOutput] = {}
        for i, (one, own) in enumerate(zip(prompts, params, strict=True)):
            llm.engine.add_request(str(i), one, own)
        while llm.engine.has_unfinished_requests:
            finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
            check_live_beams(llm, params)
        assert answers([finished[str(i)] for i in range(len(prompts))]) == expected
        assert all(finished[f"plain {i}"].outputs[0].token_ids == plain for i in range(4))
        stats = llm.stats()
        preempted = sum(output.metrics.num_preemptions for name, output in finished.items() if "plain" not in name)
        assert (stats["num_preemptions"] > 0) == (preempted > 0) == (blocks == 16)
        assert stats["num_used_blocks"] == stats["num_running"] == stats["num_waiting"] == 0
        assert stats["num_block_copies"] > 0
        assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]


def test_beams_that_were_swapped_out(cpu: LLM, model: Path) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 33, 9, 20))]
    swaps: dict[str, Any] = {"swap_space_bytes": 1 << 22, "preemption_mode": "swap", "num_threads": 1}
    with LLM(str(model), backend="cpu", num_kv_blocks=16, max_num_seqs=8, **swaps) as llm:
        assert answers(llm.beam_search(prompts, PARAMS[1])) == answers(cpu.beam_search(prompts, PARAMS[1]))
        stats = llm.stats()
        assert min(stats["num_preemptions_swap"], stats["num_swapped_out_blocks"], stats["num_swapped_in_blocks"]) > 0
        assert stats["num_used_blocks"] == 0


def test_layers_that_look_back_over_a_window(tmp_path: Path) -> None:
    """Gemma 3's mixture, with windows of 12: what a beam goes on from has lost most of its blocks in three layers of
    four."""
    path = make("gemma3", tmp_path, vocab_size=VOCABULARY, head_dim=16).path
    make_tokenizer(path, adds_bos=False)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    stops = ends(50, seed=4)
    params = ended_by(stops, beam_width=4, length_penalty=0.5)
    prompts = [prompt(length, seed) for seed, length in enumerate((90, 60, 5, 110))]
    with LLM(str(path), backend="torch", dtype="float32", **ROOMY) as llm:
        for output in llm.beam_search(prompts, params):
            expected = transformers_beams(reference, output.prompt_token_ids, params, stops)
            assert [beam.token_ids for beam in output.outputs] == [tokens for tokens, _ in expected]
    with LLM(str(path), backend="cpu", enable_prefix_caching=False, **ROOMY) as llm:
        expected = answers([llm.beam_search(one, params)[0] for one in prompts])
    for caching in (True, False):
        few: dict[str, Any] = {"num_kv_blocks": 76, "max_num_batched_tokens": 20, "enable_prefix_caching": caching}
        with LLM(str(path), backend="cpu", num_threads=1, **few) as llm:
            assert answers(llm.beam_search(prompts, params)) == expected
            assert llm.stats()["num_preemptions"] > 0
            assert llm.stats()["num_used_blocks"] == 0


def check_live_beams(llm: LLM, params: list[BeamSearchParams]) -> None:
    """Never more beams than the width; each is known by its request and its place."""
    choices: dict[str, list[int]] = {}
    for sequence in llm.kv_snapshot().sequences:
        choices.setdefault(sequence.request_id, []).append(sequence.choice)
    for name, own in choices.items():
        if "plain" not in name:
            assert sorted(own) == list(range(len(own)))
            assert len(own) <= params[int(name)].beam_width


@pytest.mark.parametrize("caching", [True, False])
def test_beams_that_lose_their_blocks_while_they_wait_for_others(cpu: LLM, model: Path, caching: bool) -> None:
    """A budget of 3 computes 4 beams in two steps; whoever comes in between takes the blocks of some, or of all."""
    params = BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True)
    urgent = SamplingParams(temperature=0, max_tokens=1)
    engine = LLMEngine.from_options(
        str(model),
        backend="cpu",
        enable_prefix_caching=caching,
        scheduling_policy="priority",
        max_num_batched_tokens=3,
        num_kv_blocks=12,
        num_threads=1,
    )
    engine.add_request("search", prompt(17, 3), params, priority=1)
    (search,) = engine._core._beams._searches.values()
    rng, lost = random.Random(1), {"all": 0, "with candidates": 0, "some": 0}
    outputs: list[RequestOutput] = []
    while "search" not in [output.request_id for output in outputs]:
        if rng.random() < (0.3 if caching else 0.06):  # without a cache it has to compute more before it gets on
            engine.add_request("urgent", prompt(rng.randrange(40, 180), rng.random()), urgent, priority=0)
        while True:
            outputs += [output for output in engine.step() if output.finished]
            without = [beam for beam in search.beams if not beam.block_tables]
            lost["all"] += len(without) == len(search.beams) > 1
            lost["some"] += 0 < len(without) < len(search.beams)
            lost["with candidates"] += any(beam.seq_id in search.candidates for beam in without)
            if {sequence.request_id for sequence in engine.kv_snapshot().sequences} <= {"search"}:
                break
    assert min(lost.values()) > 0
    assert outputs[-1].metrics.num_preemptions > 3
    assert answers(outputs[-1:]) == answers(cpu.beam_search(prompt(17, 3), params))
    assert engine.stats()["num_used_blocks"] == 0
    engine.close()


@pytest.mark.parametrize("caching", [True, False])
def test_what_a_search_costs(model: Path, caching: bool) -> None:
    """The prompt is computed once; each step computes one token a beam; shared tails are copied."""
    with LLM(str(model), backend="cpu", enable_prefix_caching=caching, **ROOMY) as llm:
        llm.beam_search(prompt(100, 1), BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
        stats = llm.stats()
        assert stats["num_tokens"] == 100 + 4 * 19
        assert stats["num_steps"] == 20
        assert stats["num_block_copies"] > 3
        assert stats["peak_used_blocks"] <= 6 + 4 * 2  # the prompt's full blocks, and two more a beam
        assert stats["num_used_blocks"] == 0


class TestEnds:
    def test_refused_with_the_numbers(self, model: Path) -> None:
        with LLM(str(model), num_kv_blocks=20, max_num_seqs=6, num_threads=1) as llm:
            with pytest.raises(RequestError, match="beam_width=7: at most max_num_seqs=6 "):
                llm.beam_search("a", BeamSearchParams(beam_width=7))
            params = BeamSearchParams(beam_width=6, max_tokens=60, ignore_eos=True)
            with pytest.raises(RequestError, match=r"beam_width=6 beams of up to 65 .* 4 KV .* 24 in all.* 20:"):
                llm.beam_search(prompt(5, 1), params)
            assert llm.stats()["num_waiting"] == 0
            fits = BeamSearchParams(beam_width=5, max_tokens=60, ignore_eos=True)
            assert len(llm.beam_search(prompt(5, 1), fits)[0].outputs) == 5

    def test_malformed(self, cpu: LLM) -> None:
        params = BeamSearchParams(beam_width=2)
        with pytest.raises(RequestError, match="prompt 1: prompt_token_ids: 9999 is not a token id"):
            cpu.beam_search(["a", {"prompt_token_ids": [9999]}], params)
        with pytest.raises(RequestError, match="the context holds 256, and at least one must be left"):
            cpu.beam_search(prompt(256, 1), params)
        with pytest.raises(RequestError, match="stop_token_ids: 320 is not a token id"):
            cpu.beam_search("a", BeamSearchParams(beam_width=2, stop_token_ids=[320]))
        with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
            cpu.beam_search(["a", "b"], [params])
        with pytest.raises(RequestError, match=r"sampling_params=BeamSearchParams.*: expected SamplingParams$"):
            cpu.generate("a", params)
        for one in (SamplingParams(), [SamplingParams()], None, 4):
            with pytest.raises(RequestError, match=r"expected BeamSearchParams$"):
                cpu.beam_search("a", one)

    def test_up_to_the_end_of_the_context(self, cpu: LLM) -> None:
        params = BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True)
        (output,) = cpu.beam_search(prompt(250, 1), params)
        assert [len(beam.token_ids) for beam in output.outputs] == [6, 6]

    def test_aborted_at_any_moment(self, model: Path) -> None:
        engine = LLMEngine.from_options(str(model), num_kv_blocks=64, max_num_seqs=4, num_threads=1)
        params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
        engine.add_request("runs", prompt(20, 1), params)
        engine.step()
        engine.add_request("waits", prompt(20, 1), params)
        for _ in range(4):
            engine.step()
        assert {s.request_id for s in engine.kv_snapshot().sequences} == {"runs", "waits"}
        waited = engine.abort("waits")
        assert [(beam.token_ids, beam.finish_reason) for beam in waited.outputs] == [([], "abort")]
        output = engine.abort("runs")
        assert output.finished
        assert [len(beam.token_ids) for beam in output.outputs] == [5] * 4
        assert {beam.finish_reason for beam in output.outputs} == {"abort"}
        scores = [beam.score for beam in output.outputs]
        assert scores == sorted(scores, reverse=True)
        assert engine.abort("runs") is None
        assert not engine.has_unfinished_requests
        assert engine.stats()["num_used_blocks"] == 0
        engine.add_request("runs", prompt(20, 1), params)
        engine.close()

    def test_one_beam_that_fails_ends_its_search_alone(self, tmp_path: Path) -> None:
        """An id whose embedding is NaN poisons the beam that takes it."""
        from safetensors.torch import load_file, save_file

        path = make_llama(tmp_path / "nan", vocab_size=VOCABULARY, seed=1, tie_word_embeddings=False)
        params = BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True)
        with LLM(str(path), num_kv_blocks=64, num_threads=1) as llm:
            good, bad = llm.beam_search([prompt(6, 1), prompt(6, 2)], params)
        poison = next(t for t in bad.outputs[0].token_ids[4:] if all(t not in b.token_ids for b in good.outputs))
        weights = load_file(path / "model.safetensors")
        weights["model.embed_tokens.weight"][poison] = float("nan")
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        with LLM(str(path), num_kv_blocks=64, num_threads=1) as llm:
            fine, failed = llm.beam_search([prompt(6, 1), prompt(6, 2)], params)
            assert answers([fine]) == answers([good])
            assert "not finite" in failed.error
            assert {beam.finish_reason for beam in failed.outputs} == {"error"}
            assert poison in [beam.token_ids[-1] for beam in failed.outputs]
            assert llm.stats()["num_used_blocks"] == 0

    def test_a_step_that_fails_loses_nothing(self, model: Path, cpu: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
        with LLM(str(model), num_kv_blocks=64, num_threads=1) as llm:
            engine, steps = llm.engine, 0
            execute = engine._core.executor._worker._runner.backend.execute

            def sometimes(*args: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps % 3 == 0:
                    raise RuntimeError("out of luck")
                return execute(*args)

            monkeypatch.setattr(engine._core.executor._worker._runner.backend, "execute", sometimes)
            engine.add_request("x", prompt(20, 1), params)
            outputs: list[RequestOutput] = []
            while engine.has_unfinished_requests:
                try:
                    outputs += engine.step()
                except RuntimeError:
                    continue
            assert steps > 12
            assert answers(outputs) == answers(cpu.beam_search(prompt(20, 1), params))
            assert llm.stats()["num_used_blocks"] == 0


def test_text_is_the_tokens_without_the_one_that_ended_the_beam(cpu: LLM) -> None:
    (open_end,) = cpu.beam_search("the quick brown fox", BeamSearchParams(beam_width=4, max_tokens=4))
    stops = {beam.token_ids[2] for beam in open_end.outputs}
    for included in (False, True):
        params = BeamSearchParams(
            beam_width=4, max_tokens=12, stop_token_ids=stops, include_stop_str_in_output=included
        )
        (output,) = cpu.beam_search("the quick brown fox", params)
        assert output.prompt == "the quick brown fox"
        stopped = [beam for beam in output.outputs if beam.finish_reason == "stop"]
        assert stopped
        for beam in stopped:
            assert beam.stop_reason == beam.token_ids[-1] in stops
            shown = beam.token_ids if included else beam.token_ids[:-1]
            assert beam.text == cpu.engine.tokenizer.decode(shown)


def test_a_conversation(model: Path, cpu: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (output,) = cpu.chat([{"role": "user", "content": "the lazy dog"}], params, chat_template=template)
    assert output.prompt == "user: the lazy dog\nassistant:"
    assert answers([output]) == answers(cpu.beam_search({"prompt_token_ids": output.prompt_token_ids}, params))


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cpu: LLM) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cpu.beam_search(["the quick", "a"], BeamSearchParams(beam_width=2))
    assert "generating" in capsys.readouterr().err
