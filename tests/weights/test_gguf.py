"""The GGUF reader: equal to the gguf package on honest files, one clear error on all others."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.weights import open_checkpoint
from octavo.weights.gguf import read_gguf
from octavo.weights.quants import dequantize
from tests.weights import gguf_bytes as raw

HUGE = 1 << 60


def write(directory, data, name="model.gguf"):
    path = directory / name
    path.write_bytes(data)
    return path


# ---- honest files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["smollm2_path", pytest.param("gemma3_path", marks=pytest.mark.slow)])
def both(request):
    """A real file, read by octavo and by the gguf package."""
    (path,) = request.getfixturevalue(request.param).glob("*.gguf")
    return read_gguf(path), gguf.GGUFReader(path)


def test_a_real_file_reads_as_in_the_gguf_package(both):
    ours, reference = both
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for theirs in reference.tensors:
        tensor = ours.tensors[theirs.name]
        assert tensor.dtype == theirs.tensor_type.name
        assert tensor.shape == tuple(reversed(theirs.shape.tolist()))
        np.testing.assert_array_equal(tensor.stored, theirs.data.view(np.uint8).ravel())
    fields = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value = ours.metadata[name]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


def test_a_real_file_decodes_as_in_the_gguf_package(both):
    ours, reference = both
    for theirs in reference.tensors:
        tensor = ours.tensors[theirs.name]
        step = max(1, len(theirs.data) // 64) if theirs.data.ndim > 1 else 1  # every row would take ten seconds
        expected = gguf.dequantize(theirs.data[::step], theirs.tensor_type)
        actual = dequantize(tensor.raw[::step], tensor.dtype)
        np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32), err_msg=theirs.name)


def test_opening_is_fast_enough_for_a_cold_start(gemma3_path):
    (path,) = gemma3_path.glob("*.gguf")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(read_gguf(path).metadata["tokenizer.ggml.tokens"]) == 262144
        times.append(time.perf_counter() - start)
    assert min(times) < 1  # 0.1 s on an idle core; the gguf package takes ten


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value(tmp_path, version):
    keys = [
        raw.key_value("u8", raw.U8, b"\xff"),
        raw.key_value("i8", raw.I8, b"\xff"),
        raw.key_value("u16", raw.U16, b"\xff\xff"),
        raw.key_value("i16", raw.I16, b"\xff\xff"),
        raw.key_value("u32", raw.U32, b"\xff" * 4),
        raw.key_value("i32", raw.I32, b"\xff" * 4),
        raw.key_value("u64", raw.U64, b"\xff" * 8),
        raw.key_value("i64", raw.I64, b"\xff" * 8),
        raw.key_value("f32", raw.F32, struct.pack("<f", 1.5)),
        raw.key_value("f64", raw.F64, struct.pack("<d", -2.5)),
        raw.key_value("yes", raw.BOOL, b"\1"),
        raw.key_value("no", raw.BOOL, b"\0"),
        raw.text("text", "déjà vu 😊"),
        raw.array("bools", raw.BOOL, 3, b"\1\0\1"),
        raw.array("strings", raw.STRING, 2, raw.string("a") + raw.string("")),
        raw.array("numbers", raw.I16, 2, struct.pack("<2h", -1, 7)),
        raw.array("nothing", raw.F32, 0, b""),
    ]
    metadata = read_gguf(write(tmp_path, raw.gguf_file(keys, version=version))).metadata
    arrays = {name: metadata.pop(name) for name in ("bools", "numbers", "nothing")}
    assert metadata == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -1,
        "u32": 2**32 - 1,
        "i32": -1,
        "u64": 2**64 - 1,
        "i64": -1,
        "f32": 1.5,
        "f64": -2.5,
        "yes": True,
        "no": False,
        "text": "déjà vu 😊",
        "strings": ["a", ""],
    }
    assert metadata["yes"] is True
    assert arrays["bools"].dtype == np.bool_
    assert arrays["bools"].tolist() == [True, False, True]
    assert arrays["numbers"].tolist() == [-1, 7]
    assert arrays["nothing"].size == 0


def test_tensors_are_reversed_views_at_their_alignment(tmp_path):
    tensors = [raw.tensor("a", [2, 3]), raw.tensor("b", [4], offset=64)]
    data = raw.f32(*range(6)).ljust(64, b"\0") + raw.f32(6, 7, 8, 9)
    file = read_gguf(write(tmp_path, raw.gguf_file([raw.u32("general.alignment", 64)], tensors, data, alignment=64)))
    assert file.tensors["a"].shape == (3, 2)
    assert file.tensors["a"].to_float32().tolist() == [[0, 1], [2, 3], [4, 5]]
    assert file.tensors["b"].to_float32().tolist() == [6, 7, 8, 9]
    assert file.tensors["a"].raw.shape == (3, 8)
    assert not file.tensors["a"].raw.flags.writeable


# ---- split files -----------------------------------------------------------------------------------------------------


def write_split(directory, *, count=2, numbers=(0, 1), total=2, names=("a", "b")):
    parts = []
    for index, number in enumerate(numbers):
        keys = [
            raw.key_value("split.no", raw.U16, struct.pack("<H", number)),
            raw.key_value("split.count", raw.U16, struct.pack("<H", count)),
            raw.key_value("split.tensors.count", raw.I32, struct.pack("<i", total)),
        ]
        keys += [raw.text("general.name", "whole")] if index == 0 else []
        data = raw.gguf_file(keys, [raw.tensor(names[index], [2])], raw.f32(index, index))
        parts.append(write(directory, data, f"m-{index + 1:05d}-of-00002.gguf"))
    return parts


@pytest.mark.parametrize("opened", [0, 1])
def test_any_part_opens_the_whole_split_model(tmp_path, opened):
    file = read_gguf(write_split(tmp_path)[opened])
    assert {name: tensor.to_float32().tolist() for name, tensor in file.tensors.items()} == {"a": [0, 0], "b": [1, 1]}
    assert file.metadata["general.name"] == "whole"


def test_a_missing_part_is_named(tmp_path):
    first, second = write_split(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf: part 2 of 2 of the split model is missing"):
        read_gguf(first)


def test_a_part_under_another_name_is_refused(tmp_path):
    first, _ = write_split(tmp_path)
    lonely = first.rename(tmp_path / "lonely.gguf")
    with pytest.raises(ModelError, match=r"split.count is 2, but the file name stands for 1 part"):
        read_gguf(lonely)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"numbers": (0, 0)}, "do not say part 1 of 2"),
        ({"total": 3}, "hold 2 tensors, but split.tensors.count is 3"),
        ({"names": ("a", "a")}, "tensor a is also in an earlier part"),
        ({"count": 3}, r"split.count is 3"),
        ({"count": 0}, r"split.count is 0"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, change, reason):
    with pytest.raises(ModelError, match=reason):
        read_gguf(write_split(tmp_path, **change)[0])


def test_split_keys_that_are_arrays(tmp_path):
    path = write(tmp_path, raw.gguf_file([raw.array("split.count", raw.U8, 2, b"\1\1")]))
    with pytest.raises(ModelError, match=r"split.count is an array; expected an integer"):
        read_gguf(path)


# ---- hostile files ---------------------------------------------------------------------------------------------------

ONE = raw.tensor("w", [4])
DATA = raw.f32(1, 2, 3, 4)
HOSTILE = {
    "empty": (b"", "cannot be mapped"),
    "short": (b"GGU", "needs 8 bytes"),
    "magic": (raw.gguf_file(magic=b"GGML"), r"not a GGUF file: it starts with b'GGML'"),
    "version 1": (raw.gguf_file(version=1), "GGUF version 1 is not supported"),
    "version 4": (raw.gguf_file(version=4), "GGUF version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (raw.gguf_file(tensor_count=HUGE), str(HUGE)),
    "key count": (raw.gguf_file(key_count=HUGE), str(HUGE)),
    "key length": (raw.gguf_file([struct.pack("<Q", 1 << 62) + bytes(32)]), f"a string of {1 << 62} bytes"),
    "string length": (
        raw.gguf_file([raw.key_value("k", raw.STRING, struct.pack("<Q", 1 << 62))]),
        f"key 'k': a string of {1 << 62} bytes",
    ),
    "wrapping length": (
        raw.gguf_file([raw.key_value("k", raw.STRING, struct.pack("<Q", 2**64 - 8))]),
        f"a string of {2**64 - 8} bytes",
    ),
    "array length": (raw.gguf_file([raw.array("k", raw.F64, HUGE, b"")]), rf"key 'k', an array of {HUGE} elements"),
    "wrapping array": (raw.gguf_file([raw.array("k", raw.U64, 1 << 61, b"")]), str(8 << 61)),
    "string array length": (raw.gguf_file([raw.array("k", raw.STRING, HUGE, b"")]), str(HUGE)),
    "strings past the end": (
        raw.gguf_file([raw.array("k", raw.STRING, 2, raw.string("x" * 20))], alignment=1),
        "runs past the end of the file",
    ),
    "nested array": (raw.gguf_file([raw.array("k", raw.ARRAY, 1, bytes(12))]), "array of arrays"),
    "array of unknown type": (raw.gguf_file([raw.array("k", 13, 1, bytes(8))]), "unknown type 13"),
    "value type": (raw.gguf_file([raw.key_value("k", 13, bytes(8))]), "key 'k' has the unknown value type 13"),
    "bool": (raw.gguf_file([raw.key_value("k", raw.BOOL, b"\2")]), "the byte 2; a bool is 0 or 1"),
    "not UTF-8": (raw.gguf_file([raw.key_value("k", raw.STRING, raw.string(b"\xff\xfe"))]), "key 'k' is not UTF-8"),
    "long tensor name": (raw.gguf_file([], [raw.tensor("w" * 65, [4])], DATA), "has 65 characters; the limit is 64"),
    "long key": (raw.gguf_file([raw.key_value("k" * 9999, 13, bytes(8))]), r"key 'k{79}\.\.\. has the unknown value"),
    "duplicate key": (raw.gguf_file([raw.u32("k", 1), raw.u32("k", 2)]), "key 'k' occurs twice"),
    "alignment 0": (raw.gguf_file([raw.u32("general.alignment", 0)]), "general.alignment is 0"),
    "alignment 48": (raw.gguf_file([raw.u32("general.alignment", 48)]), "general.alignment is 48"),
    "alignment of text": (raw.gguf_file([raw.text("general.alignment", "32")]), "general.alignment is '32'"),
    "alignment past the end": (
        raw.gguf_file([raw.u32("general.alignment", 1 << 31)], [ONE], DATA),
        "the file has 0: it is truncated",
    ),
    "duplicate tensor": (
        raw.gguf_file([], [ONE, raw.tensor("w", [4], offset=32)], DATA + bytes(32)),
        "tensor 'w' occurs twice",
    ),
    "dimension product": (
        raw.gguf_file([], [raw.tensor("w", [1 << 32, 1 << 32, 4])], DATA),
        f"needs bytes 0 to {16 << 64}",
    ),
    "dimension": (raw.gguf_file([], [raw.tensor("w", [2**64 - 1])], DATA), str((2**64 - 1) * 4)),
    "dimension of zero": (raw.gguf_file([], [raw.tensor("w", [4, 0])], DATA), "tensor 'w' is empty"),
    "no dimensions": (raw.gguf_file([], [raw.tensor("w", [])], DATA + bytes(8)), "has 0 dimensions"),
    "many dimensions": (raw.gguf_file([], [raw.tensor("w", [1] * 5)], DATA), "has 5 dimensions"),
    "count of dimensions": (
        raw.gguf_file([], [raw.string("w") + struct.pack("<I", 2**32 - 1) + bytes(64)]),
        f"has {2**32 - 1} dimensions",
    ),
    "offset": (raw.gguf_file([], [raw.tensor("w", [4], offset=1 << 62)], DATA), f"needs bytes {1 << 62}"),
    "wrapping offset": (raw.gguf_file([], [raw.tensor("w", [4], offset=2**64 - 8)], DATA), f"{2**64 + 8} of the"),
    "unaligned offset": (raw.gguf_file([], [raw.tensor("w", [4], offset=4)], DATA + bytes(32)), "not a multiple of 32"),
    "truncated data": (raw.gguf_file([], [ONE], DATA[:-1]), "needs bytes 0 to 16 of the tensor data.*has 15"),
    "tensor type": (raw.gguf_file([], [raw.tensor("w", [4], 99)], DATA), "tensor 'w' has the unknown tensor type 99"),
    "row length": (raw.gguf_file([], [raw.tensor("w", [33, 2], 8)], bytes(999)), "rows of 33 values; Q8_0 .* of 32"),
    "overlap": (
        raw.gguf_file([], [raw.tensor("v", [9]), raw.tensor("w", [4], offset=32)], bytes(64)),
        "tensors 'v' and 'w' overlap",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_clear_error(tmp_path, case):
    data, reason = HOSTILE[case]
    path = write(tmp_path, data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=reason) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 250
    assert peak < 1 << 20


# ---- fuzzing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A tiny llama with every kind of metadata, written by the gguf package."""
    directory = tmp_path_factory.mktemp("fuzz")
    writer = gguf.GGUFWriter(directory / "small.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(4)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_token_list(["a", "b", "ça"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_add_bos_token(True)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    for name, shape in {
        "token_embd": (3, 8),
        "output_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.ffn_up": (16, 8),
    }.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    quantized = gguf.quantize(rng.normal(size=(2, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("extra.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "small.gguf"


def test_the_fuzzed_file_itself_opens(small_model):
    checkpoint = open_checkpoint(small_model)
    assert checkpoint.config["rope_scaling"]["rope_type"] == "yarn"
    assert checkpoint.unused == ["extra.weight"]


MUTATION = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 2, 7, 8, 9, 0x7F, 0x80, 0xFF]))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(MUTATION, max_size=4), cut=st.one_of(st.just(1.0), st.floats(0, 1)), whole=st.booleans())
def test_a_damaged_file_opens_or_is_a_model_error(small_model, mutations, cut, whole):
    data = bytearray(small_model.read_bytes())
    span = len(data) if whole else len(data) - 1200  # the description, without the tensors
    for place, value in mutations:
        data[int(place * span)] = value
    path = small_model.with_name("damaged.gguf")
    path.write_bytes(data[: int(cut * len(data))])
    message = ""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors.values():
            tensor.to_float32()
    except ModelError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < 4 << 20
