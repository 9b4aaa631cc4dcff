"""How each named pre-tokeniser (`tokenizer.ggml.pre`) of a byte-level BPE cuts text into words before merging.

A GGUF file stores no regex, only a name, and the wrong rule gives other ids without any error: so a name is either
known here or refused. The rules are those of the models' own tokenizer.json files; the names, and whether a name
implies BOS or `ignore_merges`, are llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ModelError

# Steps that the original files take from the library instead of a regex: its tables are of another Unicode version.
_EACH_DIGIT, _DIGIT_RUNS, _PUNCTUATION = "each digit", "digit runs", "punctuation"
_LIBRARY_STEPS = {
    _EACH_DIGIT: pre_tokenizers.Digits(individual_digits=True),
    _DIGIT_RUNS: pre_tokenizers.Digits(individual_digits=False),
    _PUNCTUATION: pre_tokenizers.Punctuation("contiguous"),
}

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
# Cased letters of some scripts, spelled out by the original; as escapes, since normalising this file would change it.
_DEEPSEEK_LLM_LETTERS = (
    r"\s?["
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}"
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}"
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
    r"]+"
)
_CJK_HANGUL = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`, each a regex or a library step, are applied one after another to the pieces that the ones before
    left: a match becomes a piece of its own, and so does every gap between matches. Then bytes are written as their
    printable stand-ins, and `byte_patterns` cut those."""

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
    return [_LIBRARY_STEPS.get(p) or pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]


_gpt2 = PreTokenizer((_GPT2,))
_digits_gpt2 = PreTokenizer((_EACH_DIGIT, _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_cl100k = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,), nfc=True)

KNOWN: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),  # llama.cpp's own
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "jais": _gpt2,
    "mpt": replace(_gpt2, nfc=True),
    "olmo": replace(_gpt2, nfc=True),
    "smollm": _digits_gpt2,
    "starcoder": _digits_gpt2,
    "refact": _digits_gpt2,
    "codeshell": _digits_gpt2,
    "command-r": replace(_digits_gpt2, nfc=True),
    "falcon": PreTokenizer((_PUNCTUATION, _GPT2), byte_patterns=(_DIGIT_RUNS, r"[0-9][0-9][0-9]")),
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "lfm2": _llama3,
    "dbrx": _cl100k,
    "glm4": _cl100k,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "stablelm2": _qwen2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            _DEEPSEEK_LLM_LETTERS,
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _CJK_HANGUL,
            _EACH_DIGIT,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, _EACH_DIGIT)),
    "deepseek-v3": PreTokenizer(
        (r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK_V3)
    ),
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
