"""Streaming: the chunks joined are the one-shot text, no chunk has half a character, nothing stalls."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from octavo.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from octavo.weights import Checkpoint

EMOJI = "🫠 你好 👩‍👩‍👧‍👦 नमस्ते \U00020731 é \ufffd end"


def chunks(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: Any) -> list[str]:
    """`ids` fed in pieces that end where `cuts` say."""
    detokenizer = Detokenizer(tokenizer, **options)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    texts = [detokenizer.feed(ids[a:b]) for a, b in pairwise(bounds)]
    return [*texts, detokenizer.flush()]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that are one byte which is not a character: what makes invalid UTF-8."""
    return [i for i in range(700) if len(tokenizer.bytes_of([i])) == 1 and tokenizer.bytes_of([i])[0] >= 0x80]


def test_random_ids(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    assert len(byte_ids) > 100
    some_id = st.sampled_from(byte_ids) | st.integers(0, tokenizer.vocab_size + 5)

    @settings(deadline=None, max_examples=400)
    @given(st.lists(some_id, max_size=30), st.lists(st.integers(0, 30), max_size=30), st.booleans())
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        texts = chunks(tokenizer, ids, cuts, skip_special_tokens=skip)
        assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


def test_prompt_and_reply_join(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    """Cut anywhere, even inside a character: no byte of the reply is lost or shown twice."""
    some_id = st.sampled_from(byte_ids) | st.integers(0, tokenizer.vocab_size - 1)

    @settings(deadline=None, max_examples=300)
    @given(st.lists(some_id, max_size=20), st.lists(some_id, max_size=20))
    def check(prompt: list[int], reply: list[int]) -> None:
        alone = Detokenizer(tokenizer)
        shown = alone.feed(prompt)  # the prompt's whole characters
        text = "".join(chunks(tokenizer, reply, [], prompt_ids=prompt))
        assert shown + text == tokenizer.decode(prompt + reply)

    check()


def test_one_token_at_a_time_never_splits_a_character(tokenizer: Tokenizer) -> None:
    """CASES 22: emoji and rare characters that take several tokens."""
    ids = tokenizer.encode(EMOJI, add_special_tokens=False)
    texts = chunks(tokenizer, ids, list(range(len(ids))))
    assert "".join(texts) == EMOJI
    assert sum("\ufffd" in text for text in texts) == 1  # the genuine one
    assert texts[-1] == ""


def byte_tokenizer(style: str) -> Tokenizer:
    """Id i is byte i; id 256 is special."""
    if style == "gpt2":
        stand_ins = {chr(b): b for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
        rest = iter(b for b in range(256) if b not in stand_ins.values())
        stand_ins |= {chr(0x100 + i): b for i, b in enumerate(rest)}
        names = {b: char for char, b in stand_ins.items()}
        tokens = [names[b] for b in range(256)]
        types = [1] * 256
    else:
        tokens, types = [f"<0x{b:02X}>" for b in range(256)], [6] * 256
    metadata = {
        "tokenizer.ggml.model": style,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<s>", "<m>"] if style == "llama" else [*tokens, "<s>", tokens[0] * 2],
        "tokenizer.ggml.token_type": [*types, 3, 1],
        "tokenizer.ggml.scores": np.zeros(258, dtype=np.float32),
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[0]}"],
        "tokenizer.ggml.bos_token_id": 256,
    }
    return load_tokenizer(Path("bytes.gguf"), metadata, {}, {})


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_every_byte_string_decodes_as_utf8(style: str) -> None:
    tokenizer = byte_tokenizer(style)

    @settings(deadline=None, max_examples=500)
    @given(st.binary(max_size=12) | st.text(max_size=6).map(lambda t: t.encode("utf-8", "surrogatepass")))
    def check(data: bytes) -> None:
        expected = data.decode("utf-8", errors="replace")
        if style == "llama":
            expected = expected.removeprefix(" ")  # the prefix that its encoder adds
        assert tokenizer.decode(list(data)) == expected
        assert "".join(chunks(tokenizer, list(data), list(range(12)))) == expected

    check()


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"\xf0\x9f\x98\x8a", ["", "", "", "😊", ""]),
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd"]),
        (b"\xf0\x9fA", ["", "", "\ufffdA", ""]),
        (b"\xffA", ["\ufffd", "A", ""]),  # can never begin a character: out at once
        (b"\x80\x80", ["\ufffd", "\ufffd", ""]),
        (b"\xc0\xaf", ["\ufffd", "\ufffd", ""]),  # overlong
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),  # a surrogate: never a character, seen at its last byte
        ("\ufffd".encode(), ["", "", "\ufffd", ""]),  # a genuine one
    ],
)
def test_held_back_only_while_it_can_become_a_character(data: bytes, texts: list[str]) -> None:
    assert chunks(byte_tokenizer("gpt2"), list(data), list(range(1, len(data)))) == texts


def test_special_tokens_in_the_stream() -> None:
    tokenizer = byte_tokenizer("gpt2")
    ids = [0xE4, 256, 0xBD, 0xA0]
    assert "".join(chunks(tokenizer, ids, [1, 2, 3])) == "你" == tokenizer.decode(ids)
    shown = chunks(tokenizer, ids, [1, 2, 3], skip_special_tokens=False)
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=False) == "\ufffd<s>\ufffd\ufffd"


def test_leading_space_of_sentencepiece() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "▁a", "▁b", "c", "▁"],
        "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1],
        "tokenizer.ggml.scores": np.array([0, 0, -1, -2, -3, -4], dtype=np.float32),
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = load_tokenizer(Path("tiny.gguf"), metadata, {}, {})
    assert tokenizer.decode([1, 2, 3, 4]) == "a bc"
    assert chunks(tokenizer, [2, 3, 4], [1, 2]) == ["a", " b", "c", ""]
    assert chunks(tokenizer, [2, 3, 4], [1, 2], prompt_ids=[1]) == ["a", " b", "c", ""]
    assert chunks(tokenizer, [3, 4], [1], prompt_ids=[1, 2]) == [" b", "c", ""]
    assert chunks(tokenizer, [3], [], prompt_ids=[1, 5]) == [" b", ""]
    assert chunks(tokenizer, [3], [], prompt_ids=[1], skip_special_tokens=False) == [" b", ""]


@pytest.fixture(scope="module")
def hugging_face_decoder(smollm2: Checkpoint) -> tokenizers.Tokenizer:
    tokens = smollm2.metadata["tokenizer.ggml.tokens"]
    reference = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    reference.decoder = decoders.ByteLevel()
    return reference


def test_agrees_with_the_librarys_stream_on_valid_text(
    smollm2_tokenizer: Tokenizer, hugging_face_decoder: tokenizers.Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode(EMOJI.replace("\ufffd", ""))
    stream = decoders.DecodeStream()
    theirs = [stream.step(hugging_face_decoder, i) or "" for i in ids]
    assert "".join(chunks(smollm2_tokenizer, ids, list(range(1, len(ids))))) == "".join(theirs)


def test_cost_of_a_token_does_not_grow(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(EMOJI * 5000, add_special_tokens=False)[:100_000]
    detokenizer = Detokenizer(tokenizer, prompt_ids=ids)
    start = time.perf_counter()
    text = "".join([detokenizer.feed([i]) for i in ids]) + detokenizer.flush()
    assert time.perf_counter() - start < 5  # 0.1 s; quadratic work would take minutes
    assert len(text) > 10_000
