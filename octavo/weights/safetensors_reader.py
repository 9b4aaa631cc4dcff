"""A reader of safetensors checkpoints that maps the files and hands out views of them.

    header length:u64  header: JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}  tensor data

Offsets count from the start of the data, and the tensors cover it without holes or overlaps. A sharded checkpoint
has an index that says which file holds which tensor. Format: README.md of huggingface/safetensors. The `safetensors`
library is not used here because it hands out numpy arrays, and numpy has no bfloat16.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from octavo.errors import ModelError
from octavo.weights.files import map_file, parse_json, read_json
from octavo.weights.quants import TYPES
from octavo.weights.tensor import WeightTensor, expected_nbytes

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library too


def read_safetensors(directory: Path) -> dict[str, WeightTensor]:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Raises:
        ModelError: a file is missing, truncated or corrupt, or index and shards do not agree.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.is_file():
        return read_safetensors_file(single)
    if index.is_file():
        return _read_shards(index)
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(found) == 1:
        return read_safetensors_file(directory / found[0])
    raise ModelError(
        f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME} is here, only {', '.join(found) or 'nothing'}"
    )


def read_safetensors_file(path: Path) -> dict[str, WeightTensor]:
    """The tensors of one file, as views of the mapped file."""
    data = map_file(path)
    if len(data) < 8:
        raise ModelError(f"{path}: {len(data)} bytes are too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(len(data) - 8, _MAX_HEADER):
        raise ModelError(
            f"{path}: the header says it has {length} bytes, but the file has {len(data)} "
            f"and the limit is {_MAX_HEADER}: it is truncated, corrupt, or not a safetensors file"
        )
    header = parse_json(data[8 : 8 + length], f"{path}: header")
    header.pop("__metadata__", None)
    start = 8 + length
    available = len(data) - start
    tensors: dict[str, WeightTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        shape, dtype, begin, end = _check_entry(f"{path}: tensor {name!r}", entry, available)
        stored = np.frombuffer(data, np.uint8, end - begin, start + begin) if end > begin else np.empty(0, np.uint8)
        tensors[name] = WeightTensor(name, shape, dtype, stored)
        spans.append((begin, end, name))
    _check_cover(path, spans, available)
    return tensors


def _check_entry(what: str, entry: Any, available: int) -> tuple[tuple[int, ...], str, int, int]:
    """(shape, dtype, begin, end) of one header entry."""
    if not isinstance(entry, dict):
        raise ModelError(f"{what}: its description is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in TYPES or TYPES[dtype].block != 1:
        raise ModelError(f"{what}: unknown dtype {dtype!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ModelError(f"{what}: shape and data_offsets must be lists of non-negative integers")
    begin, end = offsets
    size = expected_nbytes(tuple(shape), dtype)
    if end - begin != size:
        raise ModelError(f"{what}: {dtype} {shape} needs {size} bytes, but its data_offsets are {begin} and {end}")
    if end > available:
        raise ModelError(f"{what} ends at byte {end} of the data, but the file has {available}: it is truncated")
    return tuple(shape), dtype, begin, end


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_cover(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    """The tensors must cover the data exactly: no overlap, no hole, nothing left over."""
    covered = 0
    for begin, end, name in sorted(spans):
        if begin != covered:
            problem = "overlaps another" if begin < covered else "leaves a hole before it"
            raise ModelError(f"{path}: tensor {name!r} at bytes {begin} to {end} {problem} (expected byte {covered})")
        covered = end
    if covered != available:
        raise ModelError(f"{path}: its tensors cover {covered} bytes, but the file has {available} bytes of data")


def _read_shards(index: Path) -> dict[str, WeightTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    shards: dict[str, dict[str, WeightTensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: {shard!r} is not the name of a safetensors file in the same directory")
        if not (index.parent / shard).is_file():
            raise ModelError(f"{index}: it lists {shard}, which is missing")
        shards[shard] = read_safetensors_file(index.parent / shard)
    tensors: dict[str, WeightTensor] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{index}: it places tensor {name!r} in {shard}, which does not hold it")
        tensors[name] = shards[shard][name]
    return tensors
