"""What a profile of the native backend says, against arithmetic on the checkpoint's shapes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.backends.cpu.native import Program, isas
from octavo.metrics import OpProfile
from octavo.weights import open_checkpoint
from tests.backends.checkpoints import SIZES, VOCAB, WINDOW, make, prompt
from tests.backends.native import NativePaged, load_native

HEADS, KV_HEADS, DIM = 6, 2, 16
HIDDEN, LAYERS = SIZES["hidden_size"], SIZES["num_hidden_layers"]
SIZE = {"head_dim": DIM}
OLD, NEW = {"a": 30, "b": 1}, {"a": 20, "b": 7}  # tokens in the cache, and in the step
ROWS = sum(NEW.values())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"), **SIZE).path


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("mistral-window", tmp_path_factory.mktemp("mistral"), **SIZE).path


def profile(path: Path, *, fuse: bool = True, num_threads: int = 1) -> tuple[list[OpProfile], float]:
    """Of one step with two sequences in the middle of their prompts, all logits wanted; and its seconds."""
    paged = NativePaged(load_native(path, fuse=fuse, num_threads=num_threads))
    paged.step({name: prompt(count) for name, count in OLD.items()})
    profiler = paged.native.profiler()
    profiler.start()
    start = time.perf_counter()
    paged.step({name: prompt(count, seed=1) for name, count in NEW.items()})
    seconds = time.perf_counter() - start
    return profiler.stop(), seconds


def total(ops: Iterable[OpProfile], what: str, *kinds: str) -> float:
    return sum(getattr(op, what) for op in ops if op.kind.split("+")[0] in kinds)


def linear_shapes(path: Path) -> list[tuple[int, ...]]:
    """[n, k] of every matrix but the embedding and the output projection."""
    tensors = open_checkpoint(path).tensors.items()
    return [tensor.shape for name, tensor in tensors if len(tensor.shape) == 2 and name.startswith("layers.")]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@pytest.mark.parametrize("fuse", [True, False])
def test_products(llama: Path, fuse: bool) -> None:
    ops, _ = profile(llama, fuse=fuse)
    shapes = linear_shapes(llama)
    assert len(shapes) == 7 * LAYERS
    assert total(ops, "flops", "matmul") == sum(2 * ROWS * n * k for n, k in shapes)
    assert total(ops, "flops", "logits") == 2 * ROWS * VOCAB * HIDDEN
    # A packed matrix has whole panels of 16 columns and whole chunks of 32 k's, two bytes each.
    assert total(ops, "weight_bytes", "matmul") == sum(2 * padded(n, 16) * padded(k, 32) for n, k in shapes)
    kinds = {op.kind for op in ops}
    assert kinds >= ({"matmul+add", "matmul+silu_mul"} if fuse else {"matmul", "add", "silu_mul"})


def test_each_weight_is_read_once(llama: Path) -> None:
    ops, _ = profile(llama)
    backend = load_native(llama)
    embedding = 2 * VOCAB * padded(HIDDEN, 32)
    assert sum(op.weight_bytes for op in ops if op.kind != "embed") == backend.weight_bytes - embedding
    assert total(ops, "weight_bytes", "embed") == 2 * ROWS * HIDDEN


@pytest.mark.parametrize("window", [None, WINDOW])
def test_attention(llama: Path, windowed: Path, window: int | None) -> None:
    ops, _ = profile(windowed if window else llama)
    pairs, positions = 0, 0
    for name, new in NEW.items():
        seen = [set(range(0 if window is None else max(0, p - window + 1), p + 1)) for p in np.arange(new) + OLD[name]]
        pairs += sum(map(len, seen))
        positions += len(set().union(*seen))
    assert total(ops, "flops", "attention") == LAYERS * 4 * HEADS * DIM * pairs
    assert total(ops, "kv_bytes", "attention") == LAYERS * 2 * 2 * KV_HEADS * DIM * positions
    assert total(ops, "kv_bytes", "store") == ROWS * load_native(llama).kv_bytes_per_token


def test_activations(llama: Path) -> None:
    """The residual stream is float32, all else bfloat16."""
    ops, _ = profile(llama)
    assert total(ops, "other_bytes", "embed") == 4 * ROWS * HIDDEN
    assert total(ops, "other_bytes", "select_rows") == 2 * 4 * ROWS * HIDDEN
    assert total(ops, "other_bytes", "rms_norm") == (2 * LAYERS + 1) * (4 + 2) * ROWS * HIDDEN
    (down,) = {op.other_bytes for op in ops if op.kind == "matmul+add" and op.shape.startswith("80 x")}
    assert down == ROWS * (2 * 80 + (4 + 4) * HIDDEN)
    assert total(ops, "other_bytes", "logits") == ROWS * (2 * HIDDEN + 4 * VOCAB)
    assert total(ops, "other_bytes", "sample") == ROWS * 4 * VOCAB


@pytest.mark.parametrize("num_threads", [1, 2])
def test_times_are_parts_of_the_step(llama: Path, num_threads: int) -> None:
    ops, seconds = profile(llama, num_threads=num_threads)
    assert all(op.runs == 1 and op.seconds > 0 for op in ops)
    assert sum(op.seconds for op in ops) <= seconds


def test_runs_and_work_add_up_over_steps_from_zero(llama: Path) -> None:
    paged = NativePaged(load_native(llama))
    profiler = paged.native.profiler()
    profiler.start()
    paged.step({"a": prompt(4)})
    once = profiler.stop()
    paged.step({"a": prompt(4)})  # not timed
    profiler.start()
    paged.step({"b": prompt(4)})
    paged.step({"c": prompt(4)})
    twice = profiler.stop()
    for one, two in zip(once, twice, strict=True):
        doubled = {
            name: 2 * getattr(one, name) for name in ("runs", "flops", "weight_bytes", "kv_bytes", "other_bytes")
        }
        assert replace(two, seconds=one.seconds) == replace(one, **doubled)


def test_a_step_without_logits_runs_no_head(llama: Path) -> None:
    paged = NativePaged(load_native(llama))
    profiler = paged.native.profiler()
    profiler.start()
    assert paged.native.logits(paged.batch({"a": prompt(9)}, logit_rows=[])).shape == (0, VOCAB)
    ops = profiler.stop()
    assert {op.kind for op in ops if op.runs == 0} == {"logits", "sample"}
    assert all(op.seconds == op.flops == op.bytes == 0 for op in ops if op.runs == 0)
    assert total(ops, "flops", "matmul") == sum(2 * 9 * n * k for n, k in linear_shapes(llama))


def test_a_profile_changes_no_bits(llama: Path) -> None:
    plain, timed = (NativePaged(load_native(llama, num_threads=2)) for _ in range(2))
    timed.native.profiler().start()
    for length in (33, 1):
        assert plain.logits(prompt(length)).tobytes() == timed.logits(prompt(length)).tobytes()


def test_stop_needs_a_start(llama: Path) -> None:
    with pytest.raises(ValueError, match="start_profile comes before"):
        load_native(llama).profiler().stop()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_roofline(llama: Path, num_threads: int) -> None:
    backend = load_native(llama, num_threads=num_threads)
    roofline = backend.profiler().measure_roofline()
    matrices = [t.shape for t in open_checkpoint(llama).tensors.values() if len(t.shape) == 2]
    assert roofline.weights_size == sum(2 * padded(n, 16) * padded(k, 32) for n, k in matrices)
    assert min(roofline.memory_bytes, roofline.weights_bytes, roofline.product_bytes, roofline.product_flops) > 0


def test_logits_that_come_in_slices_read_their_weight_again() -> None:
    """Logits are held 64 MiB at a time: sixteen rows of a million columns."""
    vocab, k, rows = 1 << 20, 32, 20
    program = Program(isas()[-1], 2)
    weight = program.add_weight(vocab, k)
    program.pack(weight, 0, 1, np.random.default_rng(0).normal(size=(rows, k)).astype(np.float32), 0)
    stream, chosen, normed = (program.add_buffer(k, *kind) for kind in ((False, True), (True, True), (True, False)))
    program.add_cache(1, 16, 0)
    program.set_vocab_size(vocab)
    program.embed(weight, 1.0, 0, (stream, 0))
    program.select_rows((stream, 0), (chosen, 0))
    program.rms_norm((chosen, 0), program.add_vector(np.ones(k, np.float32)), 1, 1e-6, (normed, 0))
    program.logits((normed, 0), weight)
    program.allocate_kv_cache(4, 16)

    def logits(tokens: list[int]) -> np.ndarray:
        count = len(tokens)
        everything = np.arange(count, dtype=np.int32)
        batch = SimpleNamespace(
            token_ids=np.array(tokens, np.int32),
            positions=everything,
            slot_mapping=everything.astype(np.int64)[None],
            query_starts=np.array([0, count], np.int32),
            block_tables=np.arange(4, dtype=np.int32)[None, None],
            logit_rows=everything,
        )
        result = np.empty((count, vocab), np.float32)
        program.step(batch, None, vocab, everything, result)
        return result[:, :rows]

    program.start_profile()
    together = logits(list(range(rows)))
    head, sampling = program.stop_profile()[-2:]
    assert (head["kind"], head["runs"], sampling["runs"]) == ("logits", 2, 2)
    assert head["weight_bytes"] == 2 * 2 * vocab * k
    assert head["flops"] == 2 * rows * vocab * k
    assert sampling["other_bytes"] == 4 * rows * vocab
    for token in (0, 15, 16, 19):
        assert together[token].tobytes() == logits([token])[0].tobytes()
