"""A reader of GGUF files, versions 2 and 3 (little-endian), that maps the file and trusts nothing in it.

    "GGUF"  version:u32  tensor count:u64  key count:u64
    key-values            key:string  value type:u32  value      (an array: element type:u32, length:u64, elements)
    tensor descriptions   name:string  dimension count:u32  dimensions:u64...  type:u32  offset:u64
    padding to `general.alignment`
    tensor data           each tensor at its offset from here

A string is length:u64 and UTF-8 bytes. The first dimension is the contiguous one, so shapes read here are reversed.
Specification: docs/gguf.md of ggml-org/ggml. Every count, length, offset and product is compared, as a Python integer
that cannot overflow, with the bytes that the file still has, before anything of that size is made.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.weights.files import map_file, shown
from octavo.weights.quants import TYPES_BY_GGML_ID
from octavo.weights.tensor import WeightTensor, expected_nbytes

_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_KEY_VALUE = 13  # bytes: empty key, type, one byte of value
_MIN_TENSOR = 32  # bytes: empty name, dimension count, one dimension, type, offset
_MAX_TENSOR_NAME = 64
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a GGUF model holds. `metadata`: numbers, bools, strings, numpy arrays (numbers, bools), lists of strings."""

    metadata: dict[str, Any]
    tensors: dict[str, WeightTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file; of a split model (`...-00001-of-00003.gguf`) any part stands for all.

    The key-values are those of the first part. Tensors stay in the mapped files.

    Raises:
        ModelError: a file is missing, truncated, corrupt, or of a kind that octavo does not read.
    """
    parts = split_parts(path)
    first = _read_part(parts[0])
    count = _split_key(first, parts[0], "split.count", 1)
    if max(count, 1) != len(parts):
        raise ModelError(
            f"{parts[0]}: split.count is {count}, but the file name stands for {len(parts)} part(s); "
            "name the parts NAME-00001-of-0000N.gguf"
        )
    tensors = dict(first.tensors)
    for number, part in enumerate(parts[1:], 1):
        other = _read_part(part)
        if (_split_key(other, part, "split.no", 0), _split_key(other, part, "split.count", 1)) != (number, count):
            raise ModelError(f"{part}: its split.no and split.count do not say part {number} of {count}")
        if twice := tensors.keys() & other.tensors.keys():
            raise ModelError(f"{part}: tensor {min(twice)} is also in an earlier part")
        tensors.update(other.tensors)
    expected = _split_key(first, parts[0], "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{path}: its parts hold {len(tensors)} tensors, but split.tensors.count is {expected}")
    return GGUFFile(first.metadata, tensors)


def split_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, in order; a missing one is a ModelError."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    parts = []
    for number in range(1, int(match["count"]) + 1):
        part = path.with_name(f"{match['prefix']}-{number:05d}-of-{match['count']}.gguf")
        if not part.is_file():
            raise ModelError(f"{part}: part {number} of {int(match['count'])} of the split model is missing")
        parts.append(part)
    return parts or [path]


def _split_key(file: GGUFFile, path: Path, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        raise ModelError(f"{path}: {key} is {shown(value)}; expected an integer")
    return value


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = map_file(path)
        self.end = len(self.data)
        self.position = 0

    def fail(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")

    def require(self, size: int, what: str) -> None:
        if size > self.end - self.position:
            raise self.fail(
                f"{what} needs {size} bytes at offset {self.position}, but the file has {self.end}: "
                "it is truncated or corrupt"
            )

    def number(self, layout: str, what: str) -> Any:
        """One number of a numpy type code such as "<u4"."""
        dtype = np.dtype(layout)
        self.require(dtype.itemsize, what)
        value = np.frombuffer(self.data, dtype, 1, self.position)[0].item()
        self.position += dtype.itemsize
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; a plain loop over few names, since a vocabulary has 262,144 of them."""
        self.require(8 * count, what)
        data, end, position = self.data, self.end, self.position
        length_at = struct.Struct("<Q").unpack_from
        result: list[bytes] = []
        for _ in range(count):
            start = position + 8
            if start > end:
                raise self.fail(f"{what} runs past the end of the file, {end} bytes: it is truncated or corrupt")
            position = start + length_at(data, position)[0]
            if position > end:
                raise self.fail(
                    f"{what}: a string of {position - start} bytes at offset {start} runs past the end of the file, "
                    f"{end} bytes: it is truncated or corrupt"
                )
            result.append(data[start:position])
        self.position = position
        try:
            return [text.decode() for text in result]
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from error

    def array(self, layout: str, count: int, what: str) -> np.ndarray[Any, Any]:
        """`count` numbers as a read-only view of the file."""
        dtype = np.dtype(layout)
        self.require(dtype.itemsize * count, what)
        values = np.frombuffer(self.data, dtype, count, self.position) if count else np.empty(0, dtype)
        self.position += dtype.itemsize * count
        return values


def _read_part(path: Path) -> GGUFFile:
    cursor = _Cursor(path)
    tensor_count, key_count = _read_header(cursor)
    metadata = _read_metadata(cursor, key_count)
    descriptions = list(_read_descriptions(cursor, tensor_count))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {shown(alignment)}; it must be a power of two")
    start = -(-cursor.position // alignment) * alignment
    return GGUFFile(metadata, _place(cursor, descriptions, start, alignment))


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    cursor.require(8, "a GGUF header")
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.fail(f"not a GGUF file: it starts with {magic!r}")
    cursor.position = 4
    version = cursor.number("<u4", "the version")
    if version & 0xFFFF == 0 and version:
        raise cursor.fail("a big-endian GGUF file; only little-endian files are supported")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported; versions 2 and 3 are")
    tensor_count = cursor.number("<u8", "the tensor count")
    key_count = cursor.number("<u8", "the key count")
    cursor.require(key_count * _MIN_KEY_VALUE + tensor_count * _MIN_TENSOR, f"{key_count} keys, {tensor_count} tensors")
    return tensor_count, key_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"key {index}")
        what = f"key {shown(key)}"
        if key in metadata:
            raise cursor.fail(f"{what} occurs twice")
        metadata[key] = _read_value(cursor, cursor.number("<u4", what), what)
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _BOOL:
        return bool(_read_bools(cursor, 1, what)[0])
    if kind != _ARRAY:
        raise cursor.fail(f"{what} has the unknown value type {kind}")
    element, count = cursor.number("<u4", what), cursor.number("<u8", what)
    what = f"{what}, an array of {count} elements,"
    if element in _NUMBERS:
        return cursor.array(_NUMBERS[element], count, what)
    if element == _STRING:
        return cursor.strings(count, what)
    if element == _BOOL:
        return _read_bools(cursor, count, what)
    reason = "is an array of arrays, which is not supported" if element == _ARRAY else f"has unknown type {element}"
    raise cursor.fail(f"{what} {reason}")


def _read_bools(cursor: _Cursor, count: int, what: str) -> np.ndarray[Any, Any]:
    values = cursor.array("<u1", count, what)
    if np.any(values > 1):
        raise cursor.fail(f"{what} holds the byte {values.max()}; a bool is 0 or 1")
    return values.view(np.bool_)


@dataclass(frozen=True, slots=True)
class _Description:
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the start of the tensor data


def _read_descriptions(cursor: _Cursor, count: int) -> Iterator[_Description]:
    for index in range(count):
        name = cursor.string(f"the name of tensor {index}")
        if len(name) > _MAX_TENSOR_NAME:
            raise cursor.fail(f"the name of tensor {index} has {len(name)} characters; the limit is {_MAX_TENSOR_NAME}")
        what = f"tensor {name!r}"
        rank = cursor.number("<u4", what)
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise cursor.fail(f"{what} has {rank} dimensions; 1 to {_MAX_DIMENSIONS} are supported")
        dims = cursor.array("<u8", rank, what).tolist()
        type_id = cursor.number("<u4", what)
        offset = cursor.number("<u8", what)
        if type_id not in TYPES_BY_GGML_ID:
            raise cursor.fail(f"{what} has the unknown tensor type {type_id}")
        kind = TYPES_BY_GGML_ID[type_id]
        if 0 in dims:
            raise cursor.fail(f"{what} is empty: its dimensions are {dims}")
        if dims[0] % kind.block:
            raise cursor.fail(f"{what} has rows of {dims[0]} values; {kind.name} needs a multiple of {kind.block}")
        yield _Description(name, tuple(reversed(dims)), kind.name, offset)


def _place(cursor: _Cursor, descriptions: list[_Description], start: int, alignment: int) -> dict[str, WeightTensor]:
    """Check that every tensor lies inside the data, aligned and clear of the others, and make views of them."""
    tensors: dict[str, WeightTensor] = {}
    available = max(cursor.end - start, 0)
    for each in descriptions:
        size = expected_nbytes(each.shape, each.dtype)
        if each.offset + size > available:
            raise cursor.fail(
                f"tensor {each.name!r} ({each.dtype} {list(each.shape)}) needs bytes {each.offset} to "
                f"{each.offset + size} of the tensor data, but the file has {available}: it is truncated or corrupt"
            )
        if each.offset % alignment:
            raise cursor.fail(f"tensor {each.name!r} is at offset {each.offset}, not a multiple of {alignment}")
        if each.name in tensors:
            raise cursor.fail(f"tensor {each.name!r} occurs twice")
        stored = np.frombuffer(cursor.data, np.uint8, size, start + each.offset)
        tensors[each.name] = WeightTensor(each.name, each.shape, each.dtype, stored)
    ordered = sorted(descriptions, key=lambda each: each.offset)
    for before, after in pairwise(ordered):
        if before.offset + expected_nbytes(before.shape, before.dtype) > after.offset:
            raise cursor.fail(f"tensors {before.name!r} and {after.name!r} overlap")
    return tensors
