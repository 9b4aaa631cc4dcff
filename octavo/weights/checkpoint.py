"""Open a model on disk, whatever its format: configuration, tokeniser metadata and lazily read weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.weights.files import FileIdentity, identify, read_json
from octavo.weights.gguf import read_gguf, split_parts
from octavo.weights.gguf_config import config_from_gguf
from octavo.weights.names import from_gguf, from_hf, untie
from octavo.weights.safetensors_reader import read_safetensors
from octavo.weights.tensor import WeightTensor


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model on disk. Weights stay in their mapped files until they are asked for."""

    path: Path  # the GGUF file (the first of a split one), or the directory of safetensors
    format: Literal["gguf", "safetensors"]
    config: dict[str, Any]  # as in Hugging Face's config.json
    generation_config: dict[str, Any]  # generation_config.json; {} if there is none
    metadata: Mapping[str, Any]  # GGUF key-values, for the tokeniser; {} for safetensors
    tensors: Mapping[str, WeightTensor]  # under octavo's names, see names.py
    unused: list[str]  # stored names that octavo has no use for
    sources: tuple[FileIdentity, ...]  # of the files that hold the weights, as they were before they were opened

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a directory with one GGUF model, or a directory with config.json and safetensors.

    Pickled checkpoints (.bin, .pt, .pth) are never read, since a pickle can run any code.

    Raises:
        ModelError: nothing that can be opened is there, or it is corrupt or not supported; one line that says which.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: not a .gguf file; for safetensors give the directory that holds config.json")
        return _open_gguf(path)
    if not path.is_dir():
        raise ModelError(f"{path}: no such file or directory")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return _open_safetensors(path)
    models = _gguf_models(path)
    if len(models) == 1:
        return _open_gguf(models[0])
    if models:
        raise ModelError(f"{path}: holds several GGUF models; name one: {', '.join(model.name for model in models)}")
    raise ModelError(_nothing_to_open(path))


def _gguf_models(directory: Path) -> list[Path]:
    """The GGUF models of a directory; a split one counts once, image projectors (mmproj) do not count."""
    found = (path for path in sorted(directory.glob("*.gguf")) if not path.name.startswith("mmproj"))
    return list(dict.fromkeys(split_parts(path)[0] for path in found))


def _nothing_to_open(directory: Path) -> str:
    if any(directory.glob("*.safetensors*")):
        return f"{directory}: safetensors without the config.json that describes the model"
    if pickles := sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")):
        return f"{directory}: only pickled weights ({pickles[0]}), which are never read; convert them to safetensors"
    return f"{directory}: neither a .gguf file nor config.json with .safetensors"


def _open_gguf(path: Path) -> Checkpoint:
    parts = split_parts(path)
    path, sources = parts[0], tuple(identify(part) for part in parts)
    file = read_gguf(path)
    try:
        config = config_from_gguf(file.metadata, file.tensors)
        tensors, unused = from_gguf(file.tensors, config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return Checkpoint(path, "gguf", config, {}, file.metadata, tensors, unused, sources)


def _open_safetensors(directory: Path) -> Checkpoint:
    config = read_json(directory / "config.json")
    _refuse_quantized(directory, config)
    generation = directory / "generation_config.json"
    sources = tuple(identify(path) for path in sorted(directory.glob("*.safetensors*")))  # an index, too
    try:
        tensors, unused = from_hf(read_safetensors(directory), config)
        tensors, tied = untie(tensors, config)
    except ModelError as error:
        raise error if str(error).startswith(str(directory)) else ModelError(f"{directory}: {error}") from error
    return Checkpoint(
        path=directory,
        format="safetensors",
        config={**config, "tie_word_embeddings": tied},
        generation_config=read_json(generation) if generation.is_file() else {},
        metadata={},
        tensors=tensors,
        unused=unused,
        sources=sources,
    )


def _refuse_quantized(directory: Path, config: Mapping[str, Any]) -> None:
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        raise ModelError(f"{directory}/config.json: text_config is not an object")
    quantization = config.get("quantization_config") or (text or {}).get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{directory}/config.json: weights quantised by {method!r} are not supported in safetensors; "
            "use the unquantised model or a GGUF file"
        )
