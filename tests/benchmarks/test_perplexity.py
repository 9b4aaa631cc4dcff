"""The arithmetic of the quality benchmark: windows, configurations, figures."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from octavo.config import engine_config
from octavo.errors import ConfigError
from octavo.outputs import Logprob

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def perplexity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "perplexity", raising=False)
    return importlib.import_module("perplexity")


class TestWindows:
    @pytest.mark.parametrize("prefix", [[], [-1]])
    @pytest.mark.parametrize("count", [16, 17, 20, 23])
    def test_no_token_of_the_text_is_lost_or_comes_twice(
        self, perplexity: ModuleType, count: int, prefix: list[int]
    ) -> None:
        windows = perplexity.cut(list(range(count)), 4, prefix)
        assert {len(window) for window in windows[:-1]} == {4}
        assert all(window[: len(prefix)] == prefix for window in windows)
        joined = [token for window in windows for token in window[len(prefix) :]]
        # Of 17 tokens in windows of 4 the last has none before it in its window, and nothing scores it.
        assert joined == list(range(count - (count % 4 == 1 and not prefix)))

    def test_the_text_is_the_one_that_figures_were_measured_on(self, perplexity: ModuleType) -> None:
        text = perplexity.read_text()
        assert text.startswith("Chapter 1\n\nSir Walter Elliot, of Kellynch Hall, ")
        assert len(text) == 110_919

    def test_another_text_is_refused(
        self, perplexity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "persuasion.txt").write_bytes(perplexity.TEXT.read_bytes() + b" ")
        monkeypatch.setattr(perplexity, "TEXT", tmp_path / "persuasion.txt")
        with pytest.raises(ValueError, match=r"persuasion\.txt is not the text that it was"):
            perplexity.read_text()


class TestConfigurations:
    def test_names_and_options_are_joined_and_later_ones_win(self, perplexity: ModuleType) -> None:
        assert perplexity.parse_config("file") == {}
        assert perplexity.parse_config("bf16+quantization=int8+num_threads=2") == {
            "quantization": "int8",
            "num_threads": 2,
        }

    def test_an_unknown_name_is_refused(self, perplexity: ModuleType) -> None:
        with pytest.raises(ConfigError, match="'int3': expected option=value or one of oracle, file"):
            perplexity.parse_config("file+int3")

    def test_the_oracle_and_the_length_of_windows_are_options_of_an_engine(self, perplexity: ModuleType) -> None:
        config = engine_config("m", perplexity.engine_options(perplexity.PRESETS["oracle"], 500))
        assert (config.backend, config.dtype, config.quantization) == ("torch", "float32", "none")
        assert config.max_model_len == 500
        assert not config.enable_prefix_caching


class TestFigures:
    def test_perplexity_of_a_uniform_choice_is_the_number_of_choices(self, perplexity: ModuleType) -> None:
        scores = perplexity.Scores(np.full(9, -math.log(50)), np.zeros(9, np.int64))
        assert scores.perplexity == pytest.approx(50)

    def test_figures_against_the_oracle_and_llama_cpp(self, perplexity: ModuleType) -> None:
        oracle = perplexity.Scores(np.array([-1.0, -2.0, -3.0, -4.0]), np.array([1, 2, 3, 4]))
        other = perplexity.Scores(np.array([-1.1, -2.0, -2.9, -4.4]), np.array([1, 2, 3, 5]))
        figures = perplexity.compare(other, oracle, other)
        assert figures["perplexity"] == pytest.approx(math.exp(2.6))
        assert figures["ratio"] == pytest.approx(math.exp(0.1))
        # Differences -0.1, 0, 0.1, -0.4 about their mean -0.1: squares 0, 0.01, 0.04, 0.09.
        assert figures["ratio_error"] == pytest.approx(math.exp(0.1) * math.sqrt(0.14 / 3 / 4))
        assert (figures["ratio_to_llama_cpp"], figures["ratio_to_llama_cpp_error"]) == (1.0, 0.0)
        assert figures["mean_abs_delta"] == pytest.approx(0.15)
        assert figures["max_abs_delta"] == pytest.approx(0.4)
        assert figures["same_argmax"] == 0.75
        assert "ratio_to_llama_cpp" not in perplexity.compare(other, oracle, None)

    def test_the_table_has_a_column_for_llama_cpp_only_beside_it(
        self, perplexity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "150")
        scores = perplexity.Scores(np.array([-1.0, -3.0]), np.array([1, 2]))
        for llama_cpp in (None, scores):
            names = ["oracle"] if llama_cpp is None else ["oracle", "llama.cpp"]
            perplexity.report("title", {name: perplexity.compare(scores, scores, llama_cpp) for name in names})
            text = capsys.readouterr().out
            assert ("to llama.cpp" in text) == (llama_cpp is not None)
            assert f"{math.exp(2):.4f}" in text

    def test_what_stands_there_and_the_most_likely_of_each_place(self, perplexity: ModuleType) -> None:
        entries = [
            None,
            {7: Logprob(-2.0, 3, "g"), 4: Logprob(-0.5, 1, "d")},
            {9: Logprob(-0.1, 1, "i")},
            {8: Logprob(-1.0, 1, "h"), 3: Logprob(-1.0, 1, "c")},
        ]
        assert list(perplexity.scored([5, 7, 9, 8], entries)) == [(-2.0, 4), (-0.1, 9), (-1.0, 3)]
        with pytest.raises(ValueError, match="shorter"):
            list(perplexity.scored([5, 7, 9, 8], entries[:3]))
