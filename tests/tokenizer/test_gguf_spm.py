"""SentencePiece-style BPE from GGUF, against the sentencepiece library and transformers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import Checkpoint
from tests.tokenizer.corpus import SPECIAL_TEXTS, TEXTS
from tests.tokenizer.pieces import gguf_from_processor, processor_from_gguf, train

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SPACY_TEXT = st.text(st.sampled_from("ab th\n\t ▁e<h1>/"), max_size=40)


@pytest.fixture(scope="module")
def gemma3_reference(gemma3: Checkpoint) -> sentencepiece.SentencePieceProcessor:
    return processor_from_gguf(gemma3.metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_gemma3_ids_equal_sentencepiece(
    text: str, gemma3_tokenizer: Tokenizer, gemma3_reference: sentencepiece.SentencePieceProcessor
) -> None:
    # A control token in sentencepiece is always inert, as with parse_special=False.
    ids = gemma3_tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert ids == gemma3_reference.encode(text)
    assert gemma3_tokenizer.decode(ids) == text.replace("▁", " ")


def test_gemma3_ids_equal_sentencepiece_on_random_text(
    gemma3_tokenizer: Tokenizer, gemma3_reference: sentencepiece.SentencePieceProcessor
) -> None:
    @settings(deadline=None, max_examples=300)
    @given(ANY_TEXT | SPACY_TEXT)
    def check(text: str) -> None:
        ids = gemma3_tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == gemma3_reference.encode(text)
        assert gemma3_tokenizer.decode(ids) == text.replace("▁", " ")

    check()


@pytest.mark.slow
def test_gemma3_ids_equal_transformers(gemma3: Checkpoint, gemma3_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(gemma3.path.parent, gguf_file=gemma3.path.name)
    for text in [*TEXTS, *SPECIAL_TEXTS]:
        text = text.replace(" " * 40, "")  # its conversion splits runs of more than 31 spaces unlike sentencepiece
        assert gemma3_tokenizer.encode(text) == reference.encode(text), text
    for i in range(0, gemma3_tokenizer.vocab_size, 997):
        assert gemma3_tokenizer.token_text(i) == reference.decode([i]), i


def test_gemma3_loads_in_time(gemma3: Checkpoint) -> None:
    start = time.perf_counter()
    load_tokenizer(gemma3.path, gemma3.metadata, {}, {})
    assert time.perf_counter() - start < 10  # about 1.2 s on two cores; the limit only catches quadratic work


def test_gemma3_facts(gemma3_tokenizer: Tokenizer) -> None:
    assert gemma3_tokenizer.vocab_size == 262144
    assert gemma3_tokenizer.bos_token_id == 2
    assert gemma3_tokenizer.eos_token_ids == (1,)
    assert gemma3_tokenizer.adds_bos
    assert gemma3_tokenizer.chat_templates == {}
    assert gemma3_tokenizer.is_special(2)
    assert not gemma3_tokenizer.is_special(184)  # <h1>, user-defined
    assert gemma3_tokenizer.encode("") == [2]
    assert gemma3_tokenizer.encode("<bos>Hi") == gemma3_tokenizer.encode("Hi")
    assert gemma3_tokenizer.encode("<bos><bos>Hi") == [2, *gemma3_tokenizer.encode("Hi")]  # only ours is not doubled
    assert gemma3_tokenizer.encode("<bos>", parse_special=False)[:1] == [2]
    assert gemma3_tokenizer.decode(gemma3_tokenizer.encode("<bos>", parse_special=False)) == "<bos>"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Tokenizer, Any]]:
    """Makes a tokeniser of ours and the sentencepiece model that it comes from."""
    lines = [line for text in TEXTS for line in text.split("\n") if line and "\0" not in line] * 3

    def make(**options: Any) -> tuple[Tokenizer, Any]:
        processor = train(tmp_path_factory.mktemp("spm"), lines, vocab_size=900, character_coverage=0.98, **options)
        return load_tokenizer(Path("tiny.gguf"), gguf_from_processor(processor), {}, {}), processor

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"add_dummy_prefix": True},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": True, "user_defined_symbols": ["<h1>", "▁▁", "▁▁▁", "ab", "\n"]},
        {"add_dummy_prefix": True, "split_by_whitespace": False, "max_sentencepiece_length": 12},
    ],
    ids=["prefix", "no-prefix", "user-defined", "spaces-inside"],
)
def test_small_model_equals_sentencepiece(options: dict[str, Any], small: Callable[..., tuple[Tokenizer, Any]]) -> None:
    tokenizer, reference = small(**options)

    def same(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == text.replace("▁", " ")

    for text in TEXTS:
        same(text)
    settings(deadline=None, max_examples=300)(given(ANY_TEXT | SPACY_TEXT)(same))()


def test_space_prefix_follows_every_special_token(small: Callable[..., tuple[Tokenizer, Any]]) -> None:
    """As llama.cpp does, and transformers with the tokenizer.json of these models (its Prepend normaliser)."""
    tokenizer, reference = small(add_dummy_prefix=True)
    expected = [1, *reference.encode("the"), 2, 1, *reference.encode("fox")]
    assert tokenizer.encode("the</s><s>fox") == expected
    assert tokenizer.encode("<s>the</s><s>fox") == expected
    assert tokenizer.decode(expected) == "the fox"


def test_no_byte_fallback_gives_one_unknown_a_run(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", "b", "ab"],
        "tokenizer.ggml.scores": np.array([0, 0, -1, -2, 0], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 1, 1, 1], dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = load_tokenizer(tmp_path, metadata, {}, {})
    assert tokenizer.encode("abxyb") == [1, 4, 0, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "scores has 0 entries for 5 tokens"),
        ({"tokenizer.ggml.token_type": np.array([1], dtype=np.int32)}, "token_type has 1 entries for 5 tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a", "c", "d"]}, "'a' has two ids, 0 and 2"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.bos_token_id": None}, "bos_token_id is missing"),
        ({"tokenizer.ggml.bos_token_id": 5}, "outside the vocabulary of 5"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token=1"),
        ({"tokenizer.ggml.token_type": np.ones(5, dtype=np.int32)}, "neither all 256 byte tokens nor an unknown"),
    ],
)
def test_damaged_vocabulary_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", "b", "ab"],
        "tokenizer.ggml.scores": np.array([0, 0, -1, -2, 0], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 1, 1, 1], dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
    }
    merged = {key: value for key, value in {**metadata, **change}.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path, merged, {}, {})
