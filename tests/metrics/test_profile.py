"""The arithmetic of a profile, on numbers that can be checked by eye."""

from __future__ import annotations

import pytest

from octavo.metrics import OpProfile, Roofline, merge

ROOFLINE = Roofline(memory_bytes=10e9, weights_bytes=20e9, product_bytes=15e9, product_flops=100e9, weights_size=1e9)


def op(kind: str = "matmul", shape: str = "2 x 3", *, seconds: float = 1.0, flops: float = 0.0, weights: float = 0.0):
    return OpProfile(kind, shape, 1, seconds, flops, weights, kv_bytes=0.0, other_bytes=0.0)


def test_share_of_the_roofline() -> None:
    slope = op(flops=10e9, weights=10e9)  # one FLOP a byte: 20 GFLOP/s at most
    assert ROOFLINE.share(slope) == pytest.approx(0.5)
    flat = op(flops=25e9, weights=1e9)  # 25 a byte: past the ridge at 5
    assert ROOFLINE.share(flat) == pytest.approx(0.25)
    copies = op(weights=5e9)  # no arithmetic: of the bandwidth
    assert ROOFLINE.share(copies) == pytest.approx(0.25)
    assert ROOFLINE.share(op(seconds=0.0, flops=1.0)) == 0.0


def test_bytes_are_all_that_is_moved() -> None:
    assert OpProfile("attention", "", 1, 1.0, 0.0, 1.0, 20.0, 300.0).bytes == 321.0


def test_merge_adds_up_ops_of_one_kind_and_shape() -> None:
    ops = [
        OpProfile("matmul", "a", 1, 2.0, 3.0, 5.0, 7.0, 11.0),
        OpProfile("norm", "a", 2, 9.0, 0.0, 1.0, 0.0, 0.0),
        OpProfile("matmul", "b", 1, 1.0, 0.0, 0.0, 0.0, 0.0),
        OpProfile("matmul", "a", 4, 20.0, 30.0, 50.0, 70.0, 110.0),
    ]
    assert merge(ops) == [
        OpProfile("matmul", "a", 5, 22.0, 33.0, 55.0, 77.0, 121.0),
        ops[1],
        ops[2],
    ]
