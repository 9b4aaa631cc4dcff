"""Text to token ids and back, from GGUF metadata or from tokenizer.json; conversations to prompts."""

from octavo.tokenizer.chat import ChatPrompt, ChatTemplates
from octavo.tokenizer.chat_messages import Message, is_batch
from octavo.tokenizer.detokenizer import Detokenizer
from octavo.tokenizer.loader import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "ChatTemplates", "Detokenizer", "Message", "Tokenizer", "is_batch", "load_tokenizer"]
