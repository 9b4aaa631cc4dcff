"""`octavo bench`: that its figures belong together. How fast it is, is no test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.cli.workload import length_range
from tests.cli.test_cli import error_line, octavo

SMALL = ["--num-kv-blocks", "64", "--num-threads", "1"]


def bench(capsys, path: Path, *args: object) -> tuple[dict[str, Any], str]:
    code, out, err = octavo(capsys, "bench", *args, *SMALL, "--json", path)
    assert code == 0, err
    return json.loads(path.read_text()), out


class TestThroughput:
    FLAGS = ("--num-prompts", 7, "--input-len", "3:9", "--output-len", "2:6")

    def test_figures(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        figures, out = bench(capsys, tmp_path / "a.json", "throughput", tiny_llama, *self.FLAGS, "--seed", 3)
        seconds = figures["seconds"]
        assert seconds > 0
        assert 7 * 3 <= figures["input_tokens"] <= 7 * 9
        assert 7 * 2 <= figures["output_tokens"] <= 7 * 6
        assert figures["requests_per_second"] == pytest.approx(7 / seconds)
        assert figures["output_tokens_per_second"] == pytest.approx(figures["output_tokens"] / seconds)
        both = figures["input_tokens"] + figures["output_tokens"]
        assert figures["total_tokens_per_second"] == pytest.approx(both / seconds)
        assert 0 < figures["share_outside_kernels"] < 1
        assert f"7 requests, {figures['input_tokens']} tokens in and {figures['output_tokens']} out" in out
        assert "outside the kernels" in out

    def test_the_seed_makes_the_requests(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        totals = [
            {name: bench(capsys, tmp_path / "a.json", "throughput", tiny_llama, *self.FLAGS, "--seed", seed)[0][name]
             for name in ("input_tokens", "output_tokens")}
            for seed in (1, 1, 2)
        ]  # fmt: skip
        assert totals[0] == totals[1] != totals[2]

    def test_torch_has_no_kernels_to_time(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        figures, out = bench(capsys, tmp_path / "a.json", "throughput", tiny_llama, *self.FLAGS, "--backend", "torch")
        assert figures["share_outside_kernels"] is None
        assert "outside the kernels" not in out


class TestLatency:
    def test_figures(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        flags = ("--input-len", 9, "--output-len", 5, "--batch-size", 2, "--runs", 3)
        figures, out = bench(capsys, tmp_path / "a.json", "latency", tiny_llama, *flags)
        assert figures["batch_size"] == 2
        for name in ("ttft", "itl", "tpot"):
            assert set(figures[name]) == {"median", "p99"}
            for values in figures[name].values():
                assert len(values) == 3
                assert min(values) > 0
            assert all(p99 >= median for median, p99 in zip(figures[name]["median"], figures[name]["p99"], strict=True))
            assert out.count(name.upper()) == 2
        assert "2 x 9 tokens in, 5 out; 3 runs" in out

    def test_one_token_has_no_gap(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        figures, out = bench(capsys, tmp_path / "a.json", "latency", tiny_llama, "--output-len", 1, "--runs", 1)
        assert "itl" not in figures
        assert "tpot" not in figures
        assert "TTFT" in out


def test_more_than_fits(capsys, tiny_llama: Path) -> None:
    code, _, err = octavo(capsys, "bench", "latency", tiny_llama, *SMALL, "--input-len", 300)
    assert code == 1
    assert "300 tokens" in error_line(err)


@pytest.mark.parametrize("text", ["", "0", "5:2", "a", "1:", ":1", "-3:4", "1:2:3"])
def test_ranges_that_are_none(capsys, text: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "throughput", f"--input-len={text}"])
    assert stop.value.code == 2
    assert "--input-len" in capsys.readouterr().err


def test_ranges() -> None:
    assert length_range("7") == (7, 7)
    assert length_range("3:9") == (3, 9)
