"""Model files: GGUF and safetensors, mapped into memory under one set of names, in their own quantised formats."""

from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.files import FileIdentity
from octavo.weights.references import resolve_model
from octavo.weights.tensor import WeightTensor

__all__ = ["Checkpoint", "FileIdentity", "WeightTensor", "open_checkpoint", "resolve_model"]
