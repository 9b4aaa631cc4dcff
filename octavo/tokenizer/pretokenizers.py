"""How each named pre-tokeniser (`tokenizer.ggml.pre`) of a byte-level BPE cuts text into words before merging.

A GGUF file stores no regex, only a name, and the wrong rule gives other ids without any error: so a name is either
known here or refused. The rules are those of the models' own tokenizer.json files; the names, and whether a name
implies BOS or `ignore_merges`, are llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words split where case rises (fooBar -> foo, Bar): the o200k family.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _CASED_TAIL
_GPT4O = _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?") + r"|\p{N}{1,3}|" + _CASED_TAIL
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_LLM_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    r"ὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    r"Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` are applied one after another, each to the pieces that the ones before left: a match becomes a piece
    of its own, and so does every gap between matches. Then bytes are written as their printable stand-ins, and
    `byte_patterns` cut those."""

    patterns: tuple[str, ...]
    byte_patterns: tuple[str, ...] = ()
    nfc: bool = False  # the model composes Unicode (NFC) first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # where the file does not say

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*_splits(self.patterns), to_bytes, *_splits(self.byte_patterns)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _splits(patterns: tuple[str, ...]) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


_gpt2 = PreTokenizer((_GPT2,))
_digits_gpt2 = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_cl100k = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,), nfc=True)
_bloom = PreTokenizer((_BLOOM,))

KNOWN: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),  # llama.cpp's own
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "jais": _gpt2,
    "exaone4": _gpt2,
    "mpt": replace(_gpt2, nfc=True),
    "olmo": replace(_gpt2, nfc=True),
    "smollm": _digits_gpt2,
    "starcoder": _digits_gpt2,
    "refact": _digits_gpt2,
    "codeshell": _digits_gpt2,
    "exaone": _digits_gpt2,
    "minerva-7b": _digits_gpt2,
    "command-r": replace(_digits_gpt2, nfc=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2), byte_patterns=(r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "lfm2": _llama3,
    "dbrx": _cl100k,
    "smaug-bpe": _cl100k,
    "glm4": _cl100k,
    "chatglm-bpe": _cl100k,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "megrez": _qwen2,
    "stablelm2": _qwen2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LLM_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "bloom": _bloom,
    "poro-chat": _bloom,
    "gpt3-finnish": _bloom,
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}


def pretokenizer(name: str) -> PreTokenizer:
    """The rules called `name`.

    Raises:
        ModelError: the name is not known; guessing another rule would give other ids without any error.
    """
    if name not in KNOWN:
        raise ModelError(
            f"tokenizer.ggml.pre={name!r} is not a known pre-tokenizer; the known ones are {', '.join(sorted(KNOWN))}"
        )
    return KNOWN[name]
