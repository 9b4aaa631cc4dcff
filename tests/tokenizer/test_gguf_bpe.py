"""Byte-level BPE from GGUF, against transformers and the original models' tokenizer.json rules."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers

from octavo.errors import ModelError, RequestError
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.tokenizer.pretokenizers import KNOWN, pretokenizer
from octavo.weights import Checkpoint
from tests.tokenizer.corpus import SPECIAL_TEXTS, TEXTS

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def reference(smollm2: Checkpoint) -> tokenizers.Tokenizer:
    """The original model's tokenizer.json (its rules are the first lines), with the vocabulary of the GGUF file."""
    tokens, merges = smollm2.metadata["tokenizer.ggml.tokens"], smollm2.metadata["tokenizer.ggml.merges"]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _digits_gpt2()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:17])
    return tokenizer


@pytest.mark.parametrize("text", [*TEXTS, *SPECIAL_TEXTS])
def test_smollm2_ids_equal_the_original(
    text: str, smollm2_tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert smollm2_tokenizer.decode(ids) == reference.decode(ids)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)


def test_smollm2_random_text(smollm2_tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    @settings(deadline=None, max_examples=300)
    @given(ANY_TEXT)
    def check(text: str) -> None:
        ids = smollm2_tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        assert smollm2_tokenizer.decode(ids) == reference.decode(ids)

    check()


def test_smollm2_random_ids(smollm2_tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    @settings(deadline=None, max_examples=300)
    @given(st.lists(st.integers(0, 400) | st.integers(0, 49151), max_size=20))
    def check(ids: list[int]) -> None:
        assert smollm2_tokenizer.decode(ids) == reference.decode(ids)

    check()


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: Checkpoint, smollm2_tokenizer: Tokenizer) -> None:
    """With the digit splitting that transformers' GGUF conversion leaves out."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    reference._tokenizer.pre_tokenizer = _digits_gpt2()
    for text in [*TEXTS, *SPECIAL_TEXTS]:
        ids = smollm2_tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert smollm2_tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    for i in range(smollm2_tokenizer.vocab_size):
        assert smollm2_tokenizer.token_text(i) == reference.decode([i])


def test_round_trip(smollm2: Checkpoint, smollm2_tokenizer: Tokenizer) -> None:
    """Of every text but for bytes that the vocabulary has no token for (some controls): the original drops them too."""
    vocabulary = set(smollm2.metadata["tokenizer.ggml.tokens"])
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def has_tokens(char: str) -> bool:
        return set(to_bytes.pre_tokenize_str(char)[0][0]) <= vocabulary

    @settings(deadline=None, max_examples=300)
    @given(st.text(st.characters(exclude_categories=["Cs"]).filter(has_tokens), max_size=60))
    def check(text: str) -> None:
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text

    assert not has_tokens("\x13")
    assert all(has_tokens(char) for char in "aé你😊\n\t\r\0")
    check()


def test_special_text_stays_inert_inside_random_text(smollm2_tokenizer: Tokenizer) -> None:
    parts = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "start|>", "<|", " ", "\n", "a"])

    @settings(deadline=None, max_examples=300)
    @given(st.lists(parts, max_size=12).map("".join))
    def check(text: str) -> None:
        ids = smollm2_tokenizer.encode(text, parse_special=False)
        assert not any(smollm2_tokenizer.is_special(i) for i in ids)
        assert smollm2_tokenizer.decode(ids) == text
        parsed = smollm2_tokenizer.encode(text)
        assert smollm2_tokenizer.decode(parsed, skip_special_tokens=False) == text
        special = text.count("<|im_start|>") + text.count("<|im_end|>") + text.count("<|endoftext|>")
        assert sum(map(smollm2_tokenizer.is_special, parsed)) == special

    check()


def test_special_text_stays_inert(smollm2_tokenizer: Tokenizer) -> None:
    for text in SPECIAL_TEXTS:
        ids = smollm2_tokenizer.encode(text, parse_special=False)
        assert not any(smollm2_tokenizer.is_special(i) for i in ids)
        assert smollm2_tokenizer.decode(ids) == text


def test_smollm2_facts(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.bos_token_id == 1
    assert not smollm2_tokenizer.adds_bos
    assert smollm2_tokenizer.eos_token_ids == (2,)
    assert smollm2_tokenizer.encode("") == []
    assert "<|im_start|>" in smollm2_tokenizer.chat_templates["default"]
    assert smollm2_tokenizer.decode([10**9, -1, 49152]) == ""
    assert smollm2_tokenizer.token_text(10**9) == ""


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff not"])
def test_lone_surrogate_is_refused(text: str, smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        smollm2_tokenizer.encode(text)


# Original models' own pre-tokenisers, from their published tokenizer.json, in the library's primitives.
def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _deepseek_coder() -> pre_tokenizers.PreTokenizer:
    patterns = ["[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("gpt-2", _gpt2()),
        ("smollm", _digits_gpt2()),
        ("starcoder", _digits_gpt2()),
        ("command-r", _digits_gpt2()),
        ("falcon", _falcon()),
        ("deepseek-coder", _deepseek_coder()),
        ("llama-bpe", _split(_LLAMA3)),
        ("qwen2", _split(_LLAMA3.replace("{1,3}", ""))),
    ],
)
def test_words_equal_the_original_rules(name: str, original: pre_tokenizers.PreTokenizer) -> None:
    ours = pretokenizer(name).splitter()

    def same(text: str) -> None:
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text)

    for text in TEXTS:
        same(text)
    settings(deadline=None, max_examples=200)(given(ANY_TEXT)(same))()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tekken", "fooBar don't 123/\n", ["foo", "Bar", " don", "'t", " ", "1", "2", "3", "/\n"]),
        ("gpt-4o", "fooBar don't 1234/\n", ["foo", "Bar", " don't", " ", "123", "4", "/\n"]),
        ("llama-bpe", "I'LL 1234\n\n x", ["I", "'LL", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("qwen35", "नमस्ते", ["नमस्ते"]),
        ("deepseek-v3", "x1234 你好!?", ["x", "123", "4", " ", "你好", "!?"]),
        ("deepseek-llm", "Ab 你好12, яώ x\n", ["Ab", " ", "你好", "1", "2", ",", " яώ", " x", "\n"]),
        ("default", "a1234+b", ["a", "123", "4", "+", "b"]),
    ],
)
def test_words_by_hand(name: str, text: str, words: list[str]) -> None:
    found = pretokenizer(name).splitter().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == words


def test_every_known_rule_loses_nothing() -> None:
    for name in KNOWN:
        for text in TEXTS:
            words = [word for word, _ in pretokenizer(name).splitter().pre_tokenize_str(text)]
            assert "".join(words) == "".join(word for word, _ in _gpt2().pre_tokenize_str(text)), name


def _metadata(**changes: Any) -> dict[str, Any]:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc", "abc", "<s>", "<e>", "<t>", "<m>", "<u>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 4],
        "tokenizer.ggml.merges": ["b c", "a b"],
        "tokenizer.ggml.bos_token_id": 6,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 8,
        "tokenizer.ggml.eom_token_id": 9,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in {**metadata, **named}.items() if value is not None}


def test_llama3_takes_whole_words_and_adds_bos() -> None:
    path = Path("tiny.gguf")
    assert load_tokenizer(path, _metadata(), {}, {}).encode("abc") == [6, 5]  # the merges alone would give a + bc
    assert load_tokenizer(path, _metadata(pre="dbrx"), {}, {}).encode("abc") == [0, 4]
    assert load_tokenizer(path, _metadata(add_bos_token=False), {}, {}).encode("abc") == [5]
    assert load_tokenizer(path, _metadata(add_eos_token=True), {}, {}).encode("abc") == [6, 5, 7]
    assert load_tokenizer(path, _metadata(add_eos_token=True), {}, {}).encode("<s>abc<e>") == [6, 5, 7]


def test_user_defined_tokens_are_verbatim_but_not_special() -> None:
    tokenizer = load_tokenizer(Path("tiny.gguf"), _metadata(), {}, {})
    assert tokenizer.encode("a<u>b", add_special_tokens=False) == [0, 10, 1]
    assert tokenizer.encode("a<u>b", add_special_tokens=False, parse_special=False) == [0, 10, 1]
    assert tokenizer.decode([6, 0, 10, 1, 7]) == "a<u>b"
    assert tokenizer.decode([6, 0, 10, 1, 7], skip_special_tokens=False) == "<s>a<u>b<e>"


def test_eos_is_the_union() -> None:
    tokenizer = load_tokenizer(Path("tiny.gguf"), _metadata(), {"eos_token_id": 100}, {"eos_token_id": [101, 7, 100]})
    assert tokenizer.eos_token_ids == (100, 101, 7, 8, 9)
    bare = _metadata(eos_token_id=None, eot_token_id=None, eom_token_id=None)
    assert load_tokenizer(Path("tiny.gguf"), bare, {"eos_token_id": None}, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "no-such-rule"}, "'no-such-rule' is not a known pre-tokenizer; the known ones are .*llama-bpe.*qwen2"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"model": "t5"}, "'t5'"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": None}, "tokenizer.ggml.model=None"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b", "a d"]}, r"merges\[1\]='a d'"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"eos_token_id": 11}, "outside the vocabulary of 11"),
        ({"padding_token_id": 11}, "padding_token_id=11 is outside"),
    ],
)
def test_refusals_name_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(Path("tiny.gguf"), _metadata(**changes), {}, {})
    assert "\n" not in str(caught.value)
