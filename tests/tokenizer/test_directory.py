"""tokenizer.json and its companions, against transformers reading the same directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo.errors import ModelError
from octavo.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from tests.tokenizer.corpus import TEXTS
from tests.tokenizer.pieces import train

LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
PROMPTS = [*TEXTS, "<|begin_of_text|>Hello", "a<|eot_id|>b", "<s>Hello</s> there", "x <tool> y"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def load(path: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Tokenizer:
    return load_tokenizer(path, {}, config or {}, generation or {})


def byte_level(path: Path) -> None:
    """As Llama 3 publishes: special tokens past the model's vocabulary, BOS from a post-processor."""
    engine = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    engine.add_special_tokens(SPECIAL)
    engine.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    bos = engine.token_to_id(SPECIAL[0])
    engine.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], bos)]),
        ]
    )
    engine.enable_truncation(4)  # some published files have it left on; transformers switches it off too
    engine.save(str(path / "tokenizer.json"))
    write(path / "tokenizer_config.json", bos_token=SPECIAL[0], eos_token=added_token(SPECIAL[2]), chat_template="T")


def sentencepiece_style(path: Path) -> None:
    """As Llama 2 publishes: merges from a sentencepiece model, prepended U+2581, byte fallback, a stripped space."""
    lines = [line for text in TEXTS for line in text.split("\n") if line and "\0" not in line] * 3
    processor = train(path, lines, vocab_size=900)
    pieces = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    ranked = sorted((p for p in pieces if not processor.is_byte(pieces[p])), key=pieces.__getitem__)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ranked
        if piece not in ("<unk>", "<s>", "</s>")
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    engine = tokenizers.Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine.save(str(path / "tokenizer.json"))
    write(path / "special_tokens_map.json", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def added_token(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(["lstrip", "rstrip", "single_word", "normalized"], False)
    return {"__type": "AddedToken", "content": content, "special": True, **flags}


def write(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_style])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], None] = request.param
    path = tmp_path_factory.mktemp(make.__name__)
    make(path)
    return path


@pytest.fixture
def llama3(tmp_path: Path) -> Path:
    byte_level(tmp_path)
    return tmp_path


def test_equals_transformers(directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, reference = load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in PROMPTS:
        begins_with_bos = ours.encode(text, add_special_tokens=False)[:1] == [ours.bos_token_id]
        ids = reference.encode(text, add_special_tokens=not begins_with_bos)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    for i in range(ours.vocab_size):
        assert ours.token_text(i) == reference.decode([i], clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(reference)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.eos_token_ids == (reference.eos_token_id,)


def test_round_trip_and_streaming(directory: Path) -> None:
    tokenizer = load(directory)

    @settings(deadline=None, max_examples=200)
    @given(ANY_TEXT)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        expected = text.replace("▁", " ") if directory.name.startswith("sentencepiece") else text
        assert tokenizer.decode(ids) == expected
        stream = Detokenizer(tokenizer)
        assert "".join([stream.feed([i]) for i in ids]) + stream.flush() == expected

    check()


def test_special_text_stays_inert(directory: Path) -> None:
    tokenizer = load(directory)
    for text in ("<s>", "</s> x", *SPECIAL, f"a{SPECIAL[2]}b"):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == text


def test_llama3_layout(llama3: Path) -> None:
    tokenizer = load(llama3)
    bos, _, eot = (tokenizer.encode(text, add_special_tokens=False)[0] for text in SPECIAL)
    assert tokenizer.adds_bos
    assert tokenizer.bos_token_id == bos == 400
    assert tokenizer.vocab_size == 404
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode(f"{SPECIAL[0]}Hi") == tokenizer.encode("Hi")
    assert tokenizer.chat_templates == {"default": "T"}
    assert tokenizer.named_tokens == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    tool = tokenizer.encode("<tool>", add_special_tokens=False, parse_special=False)
    assert tool == [403]
    assert not tokenizer.is_special(403)
    assert len(tokenizer.encode("a b c d e f g h")) > 4  # the file's truncation is off
    union = load(llama3, {"eos_token_id": 7}, {"eos_token_id": [401, eot]})
    assert union.eos_token_ids == (7, 401, eot)


def test_chat_template_file_goes_first(llama3: Path) -> None:
    (llama3 / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert load(llama3).chat_templates == {"default": "from the file"}


def test_named_templates(llama3: Path) -> None:
    templates = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    write(llama3 / "tokenizer_config.json", chat_template=templates)
    assert load(llama3).chat_templates == {"tool_use": "A", "default": "B"}
    assert load(llama3, {"bos_token_id": 400}).bos_token_id == 400
    assert load(llama3).bos_token_id is None


def test_special_only_in_the_companions(tmp_path: Path) -> None:
    engine = tokenizers.Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    engine.decoder = decoders.ByteLevel()
    engine.save(str(tmp_path / "tokenizer.json"))
    added = {"2": {"content": "<new>", "special": True, "normalized": False}}
    write(tmp_path / "tokenizer_config.json", eos_token="</s>", added_tokens_decoder=added)
    tokenizer = load(tmp_path)
    assert tokenizer.encode("a</s><new>") == [0, 1, 2]
    assert tokenizer.decode([0, 1, 2]) == "a"
    assert tokenizer.vocab_size == 3


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; add"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ModelError, match=r"only tokenizer.model .*save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "holds a list, expected an object"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template is neither text nor a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template is neither text nor a list"),
    ],
)
def test_damaged_files_are_named(name: str, content: str, message: str, llama3: Path) -> None:
    (llama3 / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message) as caught:
        load(llama3)
    assert "\n" not in str(caught.value)


def test_bad_token_id_in_config(llama3: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id='2'"):
        load(llama3, {"eos_token_id": "2"})


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    engine = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    engine.decoder = decoders.WordPiece()
    engine.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decoder WordPiece"):
        load(tmp_path)
