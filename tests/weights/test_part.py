"""Parts of weights: the same numbers as slices of the whole, without a copy of what is not asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.weights import WeightTensor
from octavo.weights.quants import SUPPORTED, TYPES
from tests.weights.test_quants import random_rows


def make(name: str, rows: int = 24, blocks: int = 6) -> WeightTensor:
    """Blocks of a type that stores numbers one by one are 32 numbers here."""
    if TYPES[name].block > 1:
        stored, columns = random_rows(name, rows, blocks, seed=1), blocks * TYPES[name].block
    else:
        numbers = np.random.default_rng(2).normal(size=(rows, blocks * 32)).astype(np.float32)
        raw = {"F32": numbers, "F16": numbers.astype(np.float16), "BF16": (numbers.view(np.uint32) >> 16).astype("<u2")}
        stored, columns = raw[name].view(np.uint8), blocks * 32
    stored = np.ascontiguousarray(stored).reshape(-1)
    stored.flags.writeable = False  # as a mapped file
    return WeightTensor(f"of {name}", (rows, columns), name, stored)


def bits(tensor: WeightTensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.to_float32()).view(np.uint32)


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_and_columns_are_slices(name: str) -> None:
    whole = make(name)
    size = whole.shape[1] // 6
    numbers = bits(whole)
    for begin, end in [(0, 24), (0, 7), (7, 20), (23, 24)]:
        part = whole.part(0, begin, end)
        assert (part.shape, part.dtype, part.name) == ((end - begin, whole.shape[1]), name, whole.name)
        np.testing.assert_array_equal(bits(part), numbers[begin:end])
    for begin, end in [(0, 6), (0, 2), (2, 5), (5, 6)]:
        part = whole.part(1, begin * size, end * size)
        assert part.shape == (24, (end - begin) * size)
        np.testing.assert_array_equal(bits(part), numbers[:, begin * size : end * size])
        assert part.raw.shape == (24, part.nbytes // 24)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_part_is_as_large_as_its_share(name: str) -> None:
    whole = make(name)
    assert whole.part(0, 0, 8).nbytes * 3 == whole.part(1, 0, whole.shape[1] // 3).nbytes * 3 == whole.nbytes


@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_1", "Q4_K"])
def test_nothing_is_read_until_it_is_asked_for(name: str) -> None:
    whole = make(name)
    size = whole.shape[1] // 6
    for part in (whole.part(0, 3, 9), whole.part(1, size, 3 * size), whole.part(1, 0, size).part(0, 3, 4)):
        assert np.shares_memory(part.stored, whole.stored)
        assert np.shares_memory(part.raw, whole.stored)


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q4_K"])
def test_parts_of_parts(name: str) -> None:
    whole = make(name)
    size = whole.shape[1] // 6
    expected = bits(whole)[4:8, 2 * size : 4 * size]
    first = whole.part(1, size, 5 * size).part(0, 2, 12).part(1, size, 3 * size).part(0, 2, 6)
    second = whole.part(0, 4, 8).part(1, 2 * size, 4 * size)
    np.testing.assert_array_equal(bits(first), expected)
    np.testing.assert_array_equal(bits(second), expected)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_1"])
def test_rows_of_reordered_heads(name: str) -> None:
    """Four heads of six rows: heads are cut out whole, and each is still reordered as it was."""
    whole = make(name).deinterleaved(4)
    numbers = bits(whole)
    for begin, end in [(0, 6), (6, 18), (18, 24), (0, 24)]:
        np.testing.assert_array_equal(bits(whole.part(0, begin, end)), numbers[begin:end])
    size = whole.shape[1] // 6
    columns = whole.part(1, size, 4 * size)
    np.testing.assert_array_equal(bits(columns), numbers[:, size : 4 * size])
    np.testing.assert_array_equal(bits(columns.part(0, 6, 12)), numbers[6:12, size : 4 * size])


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (3, 9), (1, 24)])
def test_a_reordered_head_is_not_divided(begin: int, end: int) -> None:
    with pytest.raises(ModelError, match=f"of F32: rows {begin} to {end} divide a head of 6 rows"):
        make("F32").deinterleaved(4).part(0, begin, end)


@pytest.mark.parametrize(("name", "begin", "end"), [("Q4_1", 0, 16), ("Q4_1", 8, 32), ("Q4_K", 32, 256)])
def test_a_block_is_not_divided(name: str, begin: int, end: int) -> None:
    with pytest.raises(ModelError, match=f"of {name}: columns {begin} to {end} .* {name}'s blocks of"):
        make(name).part(1, begin, end)


@pytest.mark.parametrize("heads", [None, 4])
def test_vectors(heads: int | None) -> None:
    numbers = np.random.default_rng(3).normal(size=24).astype(np.float32)
    whole = WeightTensor("bias", (24,), "F32", numbers.view(np.uint8))
    if heads is not None:
        whole = whole.deinterleaved(heads)
    for begin, end in [(0, 6), (6, 18), (18, 24)]:
        part = whole.part(0, begin, end)
        assert part.shape == (end - begin,)
        np.testing.assert_array_equal(part.to_float32(), whole.to_float32()[begin:end])


@given(st.data())
def test_any_cuts_put_together_are_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["F32", "BF16", "Q8_0", "Q4_1", "Q6_K"]))
    whole = make(name)
    axis = data.draw(st.sampled_from([0, 1]))
    unit, count = (1, 24) if axis == 0 else (whole.shape[1] // 6, 6)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
    parts = [bits(whole.part(axis, a * unit, b * unit)) for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=axis), bits(whole))
