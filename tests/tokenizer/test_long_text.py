"""A megabyte is tokenised in seconds, whatever it holds."""

import time

import pytest

from octavo.tokenizer import Tokenizer

MEGABYTE = 1_000_000


@pytest.mark.parametrize("unit", ["a", "\t ", "▁ <", "the quick brown fox, 42 😊\n", "<|im_start|>"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_megabyte(name: str, unit: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    text = unit * (MEGABYTE // len(unit.encode()))
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - start < 20  # 0.1 to 2 s; quadratic work would take hours
    expected = text.replace("▁", " ") if name == "gemma3" else text
    assert tokenizer.decode(ids, skip_special_tokens=unit != "<|im_start|>").removeprefix("<bos>") == expected
