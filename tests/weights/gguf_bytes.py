"""GGUF files written byte by byte, so that tests can write what no honest writer would."""

import struct

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key_value(key: str, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return key_value(key, U32, struct.pack("<I", value))


def text(key: str, value: str) -> bytes:
    return key_value(key, STRING, string(value))


def array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    return key_value(key, ARRAY, struct.pack("<IQ", kind, count) + payload)


def tensor(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf_file(
    keys: list[bytes] = (),
    tensors: list[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()
