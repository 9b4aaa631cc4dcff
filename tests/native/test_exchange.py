"""Ops between workers: a program is one rank of several, and the exchange in this file plays the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo._native import Program, isas
from tests.native.kernel_rules import matrix_rule, rms_norm, rounded
from tests.native.quant_rules import grouped, quantized_rows, stored, whole_product

VOCAB, WIDTH, OUT = 48, 64, 32
FIRST, ROWS = 16, 16  # ids of this rank's part of the embedding
EPS = 1e-5
TOKENS = np.array([3, 16, 31, 47, 20, 16, 32], np.int32)
Callback = Callable[[str, Any, Any], None]


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


EMBEDDING = rounded(rng().normal(0, 1, (ROWS, WIDTH)).astype(np.float32))
WEIGHT = rounded(rng().normal(0, 0.3, (OUT, WIDTH)).astype(np.float32))
BIAS = rounded(rng().normal(0, 1, OUT).astype(np.float32))


class Others:
    """Fills an all_reduce with random partial sums of the other ranks, and keeps what it saw."""

    def __init__(self, num_ranks: int, mine: int) -> None:
        self.num_ranks, self.mine = num_ranks, mine
        self.partials: list[np.ndarray] = []
        self.sent: list[np.ndarray] = []
        self.asked: list[str] = []

    def __call__(self, kind: str, mine: Any, everyone: Any) -> None:
        self.asked.append(kind)
        if kind == "send":
            self.sent.append(np.array(mine))
            return
        assert kind == "all_reduce"
        sums = np.random.default_rng(len(self.partials)).normal(0, 100, everyone.shape).astype(np.float32)
        sums[self.mine] = mine
        everyone[...] = sums
        self.partials.append(sums)


def program(exchange: Callback, isa: str, num_threads: int, num_ranks: int, kind: str = "bfloat16") -> Program:
    """A rank's part of an embedding, all_reduce, norm, a partial product with a bias, all_reduce, add, send."""
    p = Program(isa, num_threads)
    p.set_activations("int8")
    p.set_exchange(num_ranks, exchange)
    p.set_vocab_size(VOCAB)
    p.set_num_groups(1)
    table = p.add_weight(ROWS, WIDTH)
    p.pack(table, 0, 1, EMBEDDING, 0)
    weight = p.add_weight(OUT, WIDTH, kind)
    if kind == "bfloat16":
        p.pack(weight, 0, 1, WEIGHT, 0)
    else:
        p.pack_stored(weight, 0, 1, kind, stored(kind, WEIGHT, rng()).reshape(OUT, -1), 0)
    part, x = p.add_buffer(WIDTH, False, True), p.add_buffer(WIDTH, False, True)
    h = p.add_buffer(WIDTH, False, False)
    partial, y = p.add_buffer(OUT, False, True), p.add_buffer(OUT, False, False)
    end = p.add_buffer(OUT, False, True)
    p.embed(table, 1.0, FIRST, (part, 0))
    p.all_reduce((part, 0), WIDTH, (x, 0))
    p.rms_norm((x, 0), p.add_vector(np.ones(WIDTH, np.float32)), 1, EPS, (h, 0))
    p.matmul((h, 0), weight, p.add_vector(BIAS), "float", (-1, 0), OUT, (partial, 0))
    p.all_reduce((partial, 0), OUT, (y, 0))
    p.add((x, 0), (y, 0), OUT, (end, 0))
    p.send((end, 0), OUT)
    p.allocate_kv_cache(4, 16)
    return p


def step(p: Program, tokens: np.ndarray = TOKENS) -> None:
    count = len(tokens)
    batch = SimpleNamespace(
        token_ids=tokens,
        positions=np.arange(count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        logit_rows=np.zeros(0, np.int32),
        slot_mapping=np.arange(count, dtype=np.int64)[None],
        block_tables=np.zeros((1, 1, 1), np.int32),
    )
    p.step(batch, None, 0, np.zeros(0, np.int32), np.empty((0, VOCAB), np.float32))


def in_rank_order(partials: np.ndarray) -> np.ndarray:
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial  # float32
    return total


@pytest.mark.parametrize("kind", ["bfloat16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("isa", isas())
def test_partial_sums_are_the_products_rule_and_are_added_in_rank_order(isa: str, num_threads: int, kind: str) -> None:
    others = Others(num_ranks=3, mine=1)
    step(program(others, isa, num_threads, 3, kind))
    embedded, products = others.partials
    own = (TOKENS >= FIRST) & (TOKENS < FIRST + ROWS)
    expected = np.zeros((len(TOKENS), WIDTH), np.float32)
    expected[own] = EMBEDDING[TOKENS[own] - FIRST]
    np.testing.assert_array_equal(embedded[1], expected)
    x = in_rank_order(embedded)  # not rounded: it is the residual stream
    h = np.stack([rounded(rms_norm(row, np.ones(WIDTH, np.float32), EPS)) for row in x])
    if kind == "bfloat16":
        partial = matrix_rule(h, WEIGHT)
    else:
        raw = stored(kind, WEIGHT, rng())
        partial = whole_product(quantized_rows(h, "int8"), grouped(kind, raw.reshape(OUT, -1)))
    np.testing.assert_array_equal(products[1], partial.astype(np.float32) + BIAS)
    y = in_rank_order(products)
    assert (y != in_rank_order(products[::-1])).any()  # the order matters
    assert (rounded(y) != in_rank_order(rounded(products))).any()  # and that it is rounded once
    np.testing.assert_array_equal(others.sent[0], x[:, :OUT] + rounded(y))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_exchange_that_raises_ends_the_step_and_no_other(when: int, num_threads: int) -> None:
    class Gone(Exception):
        pass

    good = Others(2, 0)
    calls = 0
    broken = False

    def exchange(kind: str, mine: Any, everyone: Any) -> None:
        nonlocal calls
        calls += 1
        if broken and calls > when:
            raise Gone(f"in {kind}")
        good(kind, mine, everyone)

    p = program(exchange, isas()[-1], num_threads, 2)
    step(p)
    expected, good.partials, good.sent = good.sent[0], [], []
    for _ in range(3):
        calls, broken = 0, True
        with pytest.raises(Gone, match=f"in {['all_reduce', 'all_reduce', 'send'][when]}"):
            step(p)
        assert calls == when + 1  # nobody is asked any more
        calls, broken, good.partials = 0, False, []
        step(p)
        np.testing.assert_array_equal(good.sent.pop(), expected)


def test_ids_are_those_of_the_whole_vocabulary() -> None:
    p = program(Others(2, 0), "portable", 1, 2)
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match="token id outside the vocabulary"):
            step(p, np.array([3, token], np.int32))
    step(p, np.array([0, VOCAB - 1], np.int32))


def test_a_program_needs_an_exchange() -> None:
    p = Program("portable", 1)
    p.set_vocab_size(VOCAB)
    x = p.add_buffer(WIDTH, False, True)
    for call in (
        lambda: p.recv((x, 0), WIDTH),
        lambda: p.send((x, 0), WIDTH),
        lambda: p.all_reduce((x, 0), WIDTH, (x, 0)),
    ):
        with pytest.raises(ValueError, match="needs an exchange"):
            call()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_are_gathered_slice_by_slice(num_threads: int) -> None:
    """A slice is 64 MB of all ranks' logits, 16 rows of so many: the other rank's columns join each one's own."""
    vocab, width, count = 1 << 20, 32, 20
    slices: list[int] = []

    def exchange(kind: str, mine: Any, everyone: Any) -> None:
        assert kind == "gather"
        slices.append(len(mine))
        everyone[:, : vocab // 2], everyone[:, vocab // 2 :] = mine, -mine

    p = Program(isas()[-1], num_threads)
    p.set_exchange(2, exchange)
    p.set_vocab_size(vocab)
    table = p.add_weight(vocab // 2, width)
    p.pack(table, 0, 1, rng().normal(size=(vocab // 2, width)).astype(np.float32), 0)
    x, s = p.add_buffer(width, False, True), p.add_buffer(width, True, True)
    h = p.add_buffer(width, True, False)
    p.add_cache(1, 16, 0)
    p.embed(table, 1.0, 0, (x, 0))
    p.select_rows((x, 0), (s, 0))
    p.rms_norm((s, 0), p.add_vector(np.ones(width, np.float32)), 1, EPS, (h, 0))
    p.logits((h, 0), table)
    p.gather()
    p.allocate_kv_cache(4, 16)

    def logits(tokens: list[int]) -> np.ndarray:
        rows = np.arange(len(tokens), dtype=np.int32)
        batch = SimpleNamespace(
            token_ids=np.array(tokens, np.int32),
            positions=rows,
            query_starts=np.array([0, len(tokens)], np.int32),
            logit_rows=rows,
            slot_mapping=rows.astype(np.int64)[None],
            block_tables=np.array([[[0, 1]]], np.int32),
        )
        copies = np.empty((len(tokens), vocab), np.float32)
        p.step(batch, None, vocab, rows, copies)
        return copies

    found = logits(list(range(7, 7 + count)))
    assert slices == [16, 4]
    np.testing.assert_array_equal(found[:, vocab // 2 :], -found[:, : vocab // 2])
    for i in (0, 15, 16, 19):  # on both sides of the border
        np.testing.assert_array_equal(found[i : i + 1], logits([7 + i]))
