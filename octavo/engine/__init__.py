"""The engine: from requests to outputs, step by step."""

from octavo.engine.inputs import Prompt, TextPrompt, TokensPrompt, prompt_text
from octavo.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine", "Prompt", "TextPrompt", "TokensPrompt", "prompt_text"]
