"""Text to token ids and back, from GGUF metadata or from tokenizer.json."""

from octavo.tokenizer.detokenizer import Detokenizer
from octavo.tokenizer.loader import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
