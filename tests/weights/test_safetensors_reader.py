"""The safetensors reader: equal to the safetensors library on honest files, one clear error on all others."""

import json
import struct

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from octavo.errors import ModelError
from octavo.weights.safetensors_reader import read_safetensors, read_safetensors_file

RNG = np.random.default_rng(0)


def file_bytes(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_equal_to_the_library(tmp_path):
    arrays = {
        "a": RNG.normal(size=(3, 5)).astype(np.float32),
        "b": RNG.normal(size=(7,)).astype(np.float16),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 4), np.float32),
        "ids": np.arange(4),
    }
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_safetensors(tmp_path)
    assert tensors.keys() == arrays.keys()
    assert tensors["ids"].dtype == "I64"
    for name in ("a", "b", "scalar", "empty"):
        assert tensors[name].shape == arrays[name].shape
        np.testing.assert_array_equal(tensors[name].to_float32(), arrays[name].astype(np.float32))
    with pytest.raises(ModelError, match="I64 are not supported"):
        tensors["ids"].to_float32()


def test_bfloat16_equals_torch(tmp_path):
    import torch
    from safetensors.torch import save_file as save_torch

    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_torch({"w": weight}, tmp_path / "other-name.safetensors")
    tensor = read_safetensors(tmp_path)["w"]
    assert tensor.dtype == "BF16"
    assert tensor.raw.shape == (5, 12)
    np.testing.assert_array_equal(tensor.to_float32(), weight.float().numpy())


HOSTILE = {
    "empty": (b"", "cannot be mapped"),
    "short": (b"1234567", "7 bytes are too few"),
    "header length": (file_bytes({}, length=1 << 62), str(1 << 62)),
    "header past the end": (file_bytes({}, length=3), "header says it has 3 bytes"),
    "not JSON": (file_bytes(b"{]"), "not valid JSON"),
    "deep JSON": (file_bytes(b"[" * 100_000), "not valid JSON"),
    "not an object": (file_bytes([]), "expected a JSON object"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "duplicate": (file_bytes(b'{"w": 1, "w": 2}'), "key 'w' occurs twice"),
    "entry": (file_bytes({"w": 3}), "tensor 'w': its description is not an object"),
    "dtype": (file_bytes({"w": entry("F31")}, bytes(8)), "tensor 'w': unknown dtype 'F31'"),
    "dtype of GGUF": (file_bytes({"w": entry("Q4_0", (32,), (0, 18))}, bytes(18)), "unknown dtype 'Q4_0'"),
    "shape": (file_bytes({"w": entry(shape=(-2,))}, bytes(8)), "non-negative integers"),
    "shape of bool": (file_bytes({"w": entry(shape=(True, 2))}, bytes(8)), "non-negative integers"),
    "shape product": (
        file_bytes({"w": entry(shape=(1 << 32, 1 << 32))}, bytes(8)),
        f"needs {4 << 64} bytes, but its data_offsets are 0 and 8",
    ),
    "offsets": (file_bytes({"w": entry(offsets=(0, 8, 9))}, bytes(8)), "non-negative integers"),
    "reversed": (file_bytes({"w": entry(offsets=(8, 0))}, bytes(8)), "data_offsets are 8 and 0"),
    "truncated": (file_bytes({"w": entry()}, bytes(7)), "ends at byte 8 of the data, but the file has 7"),
    "left over": (file_bytes({"w": entry()}, bytes(9)), "cover 8 bytes, but the file has 9"),
    "overlap": (
        file_bytes({"v": entry(), "w": entry(offsets=(4, 12))}, bytes(12)),
        "tensor 'w' at bytes 4 to 12 overlaps another",
    ),
    "hole": (file_bytes({"v": entry(), "w": entry(offsets=(12, 20))}, bytes(20)), "leaves a hole before it"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_clear_error(tmp_path, case):
    data, reason = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=reason) as caught:
        read_safetensors_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    if case not in ("duplicate",):  # the library lets the last one win
        with pytest.raises((safetensors.SafetensorError, ValueError, OSError)):
            safetensors.safe_open(path, "numpy").get_tensor("w")


def write_shards(directory, weight_map):
    save_file({"a": np.float32([1, 2])}, directory / "one.safetensors")
    save_file({"b": np.float32([3])}, directory / "two.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_read_as_one(tmp_path):
    write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    tensors = read_safetensors(tmp_path)
    assert {name: tensor.to_float32().tolist() for name, tensor in tensors.items()} == {"a": [1, 2], "b": [3]}


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (
            {"a": "../one.safetensors"},
            r"'../one.safetensors' is not the name of a safetensors file in the same directory",
        ),
        ({"a": "/etc/one.safetensors"}, "not the name"),
        ({"a": "one.bin"}, "not the name"),
        ({"a": "three.safetensors"}, "lists three.safetensors, which is missing"),
        ({"c": "one.safetensors"}, "places tensor 'c' in one.safetensors, which does not hold it"),
        ({"a": 1}, "must map tensor names to file names"),
        (None, "must map tensor names to file names"),
    ],
)
def test_a_bad_index(tmp_path, weight_map, reason):
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelError, match=reason):
        read_safetensors(tmp_path)


def test_several_files_without_an_index(tmp_path):
    for name in ("x", "y"):
        save_file({name: np.float32([1])}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"only x.safetensors, y.safetensors"):
        read_safetensors(tmp_path)
