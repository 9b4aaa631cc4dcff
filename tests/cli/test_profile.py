"""`octavo profile`: what it prints and writes, checked against the model's shapes; and its mistakes, in one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import error_line, octavo

SMALL = ["--num-kv-blocks", "64", "--num-threads", "2"]
SIZES = ["--prefill", 40, "--batch", 3, "--context", 20, "--steps", 2]
# tests/tiny.py: hidden 72, heads 6 and 2 of 16, intermediate 96, 2 layers, vocabulary 384
LINEAR = 2 * (72 * (96 + 32 + 32) + 96 * 72 + 3 * 72 * 96)
HEAD = 72 * 384


def total(phase: dict[str, Any], what: str, kind: str) -> float:
    return sum(op[what] for op in phase["ops"] if op["kind"].split("+")[0] == kind)


def test_figures(capsys, tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    code, out, err = octavo(capsys, "profile", tiny_llama, *SMALL, *SIZES, "--json", path)
    assert code == 0
    assert "requests of that length fit at once" in err
    record = json.loads(path.read_text())
    assert record["batch"] == 3
    prefill, decode = record["phases"]
    assert (prefill["steps"], decode["steps"]) == (3, 2)
    for phase, rows, logit_rows in ((prefill, 40, 1), (decode, 3, 3)):
        assert total(phase, "flops", "matmul") == phase["steps"] * 2 * rows * LINEAR
        assert total(phase, "flops", "logits") == phase["steps"] * 2 * logit_rows * HEAD
        assert total(phase, "runs", "logits") == phase["steps"]
        kernels = sum(op["seconds"] for op in phase["ops"])
        assert 0 < kernels < phase["seconds"]
        assert phase["seconds_outside_kernels"] == pytest.approx(phase["seconds"] - kernels)
        for op in phase["ops"]:
            assert f"{op['kind']} " in out
            least = max(
                op["flops"] / record["roofline"]["product_flops"], _bytes(op) / record["roofline"]["weights_bytes"]
            )
            assert op["roofline_share"] == pytest.approx(least / op["seconds"])
    # All pairs of 40 tokens, twice for two layers; 4 FLOPs a pair, head and dimension.
    assert total(prefill, "flops", "attention") == 3 * 2 * 4 * (40 * 41 / 2) * 6 * 16
    # The prompts and their first token fit one step, one more warms up: positions 22 and 23 are timed.
    assert total(decode, "kv_bytes", "attention") == 2 * 2 * 2 * 2 * 16 * 3 * (22 + 23)
    assert out.count("outside the kernels") == 2
    assert "roofline: read" in out


def _bytes(op: dict[str, float]) -> float:
    return op["weight_bytes"] + op["kv_bytes"] + op["other_bytes"]


def test_prefill_in_chunks(capsys, tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    flags = ["--max-num-batched-tokens", 16, "--json", path]
    assert octavo(capsys, "profile", tiny_llama, *SMALL, *SIZES, *flags)[0] == 0
    prefill = json.loads(path.read_text())["phases"][0]
    assert prefill["steps"] == 3 * 3  # 16 + 16 + 8 tokens
    assert total(prefill, "flops", "matmul") == 3 * 2 * 40 * LINEAR
    assert total(prefill, "runs", "logits") == 3


def test_plot(capsys, tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "roofline.png"
    assert octavo(capsys, "profile", tiny_llama, *SMALL, *SIZES, "--png", path)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib(capsys, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.roofline_plot.find_spec", lambda name: importlib.util.find_spec(f"no_{name}"))
    code, out, err = octavo(capsys, "profile", tiny_llama, *SMALL, "--png", tmp_path / "x.png")
    assert (code, out) == (1, "")
    assert "pip install 'octavo[plot]'" in error_line(err)


@pytest.mark.parametrize(("flags", "message"), [
    (["--batch", "3", "--max-num-seqs", "2"], "--batch 3: max_num_seqs is 2"),
    (["--batch", "40"], "KV blocks and the pool has 64"),
    (["--context", "255"], "need 259 tokens and the context holds 256"),
    (["--prefill", "257"], "257 tokens"),
    (["--backend", "torch"], "only backend='cpu' can be profiled"),
    (["--json", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json: No such file"),
])  # fmt: skip
def test_what_cannot_be(capsys, tiny_llama: Path, flags: list[str], message: str) -> None:
    code, _, err = octavo(capsys, "profile", tiny_llama, *SMALL, *SIZES, *flags)
    assert code == 1
    assert message in error_line(err)
