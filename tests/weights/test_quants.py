"""Every format that octavo reads, bit for bit against the gguf package, over random blocks."""

import gguf
import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.weights.quants import SUPPORTED, TYPES, TYPES_BY_GGML_ID, dequantize

HALF_FIELDS = {  # byte offsets of the half-precision scales in a block
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_rows(name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """uint8 [rows, bytes]: random bytes, but with finite scales (subnormal, negative and zero ones among them)."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, TYPES[name].nbytes), dtype=np.uint8)
    special = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, 1.0], np.float16)
    for offset in HALF_FIELDS.get(name, []):
        scales = rng.normal(0, 1, (rows, blocks)).astype(np.float16)
        scales[0, : len(special)] = special[:blocks]
        data[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equal_to_the_gguf_package(name):
    raw = random_rows(name, rows=37, blocks=9 if TYPES[name].block > 1 else 300, seed=5)
    if TYPES[name].block == 1:  # any bytes but NaN, whose payload a conversion may change
        finite = np.random.default_rng(5).normal(0, 100, (37, 300)).astype(np.float32)
        raw = gguf.quantize(finite, gguf.GGMLQuantizationType[name]).view(np.uint8)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    actual = dequantize(raw, name)
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_more_than_one_chunk(name):
    """Long enough that decoding takes several chunks, the last of them short."""
    raw = random_rows(name, rows=613, blocks=2048 // TYPES[name].block, seed=6)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(raw, name).view(np.uint32), expected.view(np.uint32))


def test_unaligned_bytes_are_read():
    values = np.arange(6, dtype=np.float32)
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:]
    np.testing.assert_array_equal(dequantize(shifted, "F32"), values)


def test_every_special_bfloat16_and_float16():
    words = np.arange(1 << 16, dtype=np.uint16)
    as_bf16 = dequantize(words.view(np.uint8), "BF16")
    np.testing.assert_array_equal(as_bf16.view(np.uint32), words.astype(np.uint32) << 16)
    np.testing.assert_array_equal(dequantize(words.view(np.uint8), "F16"), words.view(np.float16).astype(np.float32))


def test_the_table_agrees_with_the_gguf_package():
    for number, kind in TYPES_BY_GGML_ID.items():
        reference = gguf.GGMLQuantizationType(number)
        assert kind.name == reference.name
        assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[reference], kind.name


def test_a_format_without_a_decoder_is_refused_by_name():
    with pytest.raises(ModelError, match="IQ2_XXS are not supported"):
        dequantize(np.zeros(66, np.uint8), "IQ2_XXS")
