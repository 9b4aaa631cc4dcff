"""octavo: a paged LLM inference and serving engine.

Names are loaded when they are first used, so that a command that needs no engine starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.version import VERSION

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine import LLMEngine, TextPrompt, TokensPrompt
    from octavo.engine.async_llm_engine import AsyncLLMEngine
    from octavo.errors import ConfigError, ModelError, OctavoError, QueueFullError, RequestError
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from octavo.sampling_params import BeamSearchParams, SamplingParams

__version__ = VERSION

_HOME = {
    "AsyncLLMEngine": "octavo.engine.async_llm_engine",
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.engine",
    "TextPrompt": "octavo.engine",
    "TokensPrompt": "octavo.engine",
    "EngineConfig": "octavo.config",
    "BeamSearchParams": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "RequestMetrics": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "ConfigError": "octavo.errors",
    "ModelError": "octavo.errors",
    "OctavoError": "octavo.errors",
    "QueueFullError": "octavo.errors",
    "RequestError": "octavo.errors",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "ModelError",
    "OctavoError",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
