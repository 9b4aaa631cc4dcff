"""What `LLM` shows while it works: a bar on stderr for a load of over a second, on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, EngineConfig
from octavo import llm as llm_module
from octavo.llm import load_engine

OPTIONS = {"num_kv_blocks": 8, "num_threads": 1}


@pytest.mark.parametrize(("after", "terminal", "progress"), [
    (1e9, True, None), (1e9, True, True), (0.0, True, False), (0.0, False, None),
])  # fmt: skip
def test_no_bar(capsys, monkeypatch, tiny_llama: Path, after: float, terminal: bool, progress: bool | None) -> None:
    """Under a second, or where it is not wanted, or without a terminal."""
    monkeypatch.setattr(llm_module, "LOAD_BAR_AFTER", after)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    load_engine(EngineConfig(str(tiny_llama), **OPTIONS), progress=progress).close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bar_on_a_terminal(capsys, monkeypatch, tiny_llama: Path, backend: str) -> None:
    monkeypatch.setattr(llm_module, "LOAD_BAR_AFTER", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with LLM(str(tiny_llama), backend=backend, **OPTIONS) as llm:
        loading = capsys.readouterr().err
        llm.generate("the quick")
    assert "loading weights" in loading
    assert "100%" in loading
    assert "generating" in capsys.readouterr().err
