"""Packed weights on disk: the same bits as packing them, and nothing but what was written for this very model."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import PackedCache, isas
from octavo.backends.cpu.native import Program, quant_formats
from octavo.backends.cpu.packed_cache import HEADER
from octavo.errors import ConfigError
from octavo.weights import files
from tests.backends.checkpoints import make, prompt
from tests.backends.native import NativePaged, load_native
from tests.backends.paged import Logits

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}  # super-blocks
TOKENS = prompt(20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama-biases", tmp_path_factory.mktemp("llama"), head_dim=16).path


@pytest.fixture(scope="module")
def packed(path: Path) -> Logits:
    return NativePaged(load_native(path)).logits(TOKENS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "below" / "packed"


def run(path: Path, cache: Path, **options: Any) -> tuple[str, Logits]:
    """What became of the cache, and what the model says."""
    backend = load_native(path, packed_cache=cache, **options)
    return backend.packed_cache, NativePaged(backend).logits(TOKENS)


def assert_is(found: tuple[str, Logits], state: str, expected: Logits) -> None:
    assert found[0] == state
    np.testing.assert_array_equal(found[1].view(np.uint32), expected.view(np.uint32))


def only_file(cache: Path) -> Path:
    (file,) = cache.iterdir()
    assert file.suffix == ".packed"
    return file


@pytest.mark.parametrize(
    "options",
    [{"quantization": "none"}, {"quantization": "int8"}, {"stored": [*quant_formats(), "BF16"]}],
    ids=["bfloat16", "int8", "every width"],
)
def test_mapped_weights_give_the_same_bits(tmp_path: Path, cache: Path, options: dict[str, Any]) -> None:
    path = make("llama", tmp_path / "wide", head_dim=16, **WIDE).path
    without = load_native(path, **options)
    expected = NativePaged(without).logits(TOKENS)
    assert without.packed_cache == "off"
    assert_is(run(path, cache, **options), "written", expected)
    before = only_file(cache).stat()
    for num_threads in (1, 3):
        assert_is(run(path, cache, num_threads=num_threads, **options), "hit", expected)
    assert only_file(cache).stat() == before
    vectors = 4 * (2 * WIDE["num_hidden_layers"] + 1) * WIDE["hidden_size"]  # norms are not packed
    assert before.st_size == HEADER + without.weight_bytes - vectors


def test_what_does_not_change_the_packing_shares_a_file(path: Path, cache: Path) -> None:
    run(path, cache)
    linked = cache.parent / "linked"
    linked.symlink_to(path)
    for model, options in (
        (path, {"activation_dtype": "bfloat16"}),
        (path, {"kv_cache_dtype": "int8"}),
        (path, {"block_size": 32}),
        (linked, {}),
    ):
        assert load_native(model, packed_cache=cache, **options).packed_cache == "hit"
    only_file(cache)


@pytest.mark.parametrize("isa", isas()[:-1])
def test_other_options_and_instruction_sets_have_files_of_their_own(
    path: Path, packed: Logits, cache: Path, isa: str
) -> None:
    states = {
        "default": {},
        "isa": {"isa": isa},
        "int8": {"quantization": "int8"},
        "not fused": {"fuse": False},
    }
    for state in ("written", "hit"):
        for options in states.values():
            expected = NativePaged(load_native(path, **options)).logits(TOKENS)
            assert_is(run(path, cache, **options), state, expected)
    assert len(list(cache.iterdir())) == len(states)


def test_another_model_in_the_same_place_is_not_taken_for_the_old_one(tmp_path: Path, cache: Path) -> None:
    """Of the same sizes and names; changed in place, and with the old time stamp."""
    path = make("llama", tmp_path / "model", head_dim=16).path
    (file,) = path.glob("*.safetensors")
    before = NativePaged(load_native(path)).logits(TOKENS)
    assert_is(run(path, cache), "written", before)
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-4000:] = content[-8000:-4000]
    with file.open("r+b") as same:
        same.write(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_size, file.stat().st_mtime_ns) == (
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
    )
    after = NativePaged(load_native(path)).logits(TOKENS)
    assert (after != before).any()
    assert_is(run(path, cache), "written", after)
    assert_is(run(path, cache), "hit", after)


def test_a_file_that_changed_just_now_is_waited_for(tmp_path: Path) -> None:
    """Another change in the same tick of the clock would not show."""
    file = tmp_path / "file"
    for _ in range(20):
        file.write_bytes(b"1")
        start = time.time()
        one = files.identify(file)
        assert time.time() - start > 0.5 * files.CLOCK_TICK
        file.write_bytes(b"2")
        assert files.identify(file) != one


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_written_again(path: Path, packed: Logits, cache: Path, data: st.DataObject) -> None:
    run(path, cache)
    file = only_file(cache)
    good = file.read_bytes()
    bad = bytearray(good)
    kind = data.draw(st.sampled_from(["bits", "header", "lines", "shorter", "longer", "zeros"]), "kind")
    if kind in ("bits", "header"):
        last = len(bad) - 1 if kind == "bits" else HEADER - 1
        for at in data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4, unique=True), "at"):
            bad[at] ^= data.draw(st.sampled_from([1, 0x80, 0xFF]), "bits")
    elif kind == "lines":  # two pieces of 64 bytes change places
        places = st.integers(HEADER // 64, len(bad) // 64 - 1).map(lambda i: 64 * i)
        a, b = data.draw(st.lists(places, min_size=2, max_size=2, unique=True), "lines")
        bad[a : a + 64], bad[b : b + 64] = bad[b : b + 64], bad[a : a + 64]
    elif kind == "shorter":
        del bad[data.draw(st.integers(0, len(bad) - 1), "length") :]
    elif kind == "longer":
        bad += b"\0" * data.draw(st.integers(1, 100), "more")
    else:  # a page that never came to the disk
        page = data.draw(st.integers(0, (len(bad) - 1) // 4096), "page")
        bad[4096 * page : 4096 * (page + 1)] = bytes(len(bad[4096 * page : 4096 * (page + 1)]))
    if bad != good:
        file.write_bytes(bad)
        assert_is(run(path, cache), "written", packed)
    assert only_file(cache).read_bytes() == good
    assert_is(run(path, cache), "hit", packed)


def test_a_refusal_is_one_line_in_the_log(path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(path, cache)
    file = only_file(cache)
    good = file.read_bytes()
    reasons = {
        "it has 10 bytes": good[:10],
        "its header is damaged": b"GGUF" + good[4:],
        "its checksum": good[:-1] + bytes([good[-1] ^ 1]),
    }
    for reason, content in reasons.items():
        file.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "octavo"):
            assert run(path, cache)[0] == "written"
        (record,) = caplog.records
        assert f"event=packed_cache_refused file={file} reason=" in record.getMessage()
        assert reason in record.getMessage()


def test_the_file_of_another_model_is_refused(path: Path, packed: Logits, tmp_path: Path, cache: Path) -> None:
    """The same sizes: by its header alone one can tell."""
    other = make("llama-biases", tmp_path / "other", head_dim=16).path
    run(path, cache)
    first = only_file(cache)
    run(other, cache)
    (second,) = set(cache.iterdir()) - {first}
    assert first.stat().st_size == second.stat().st_size
    shutil.copyfile(second, first)
    assert_is(run(path, cache), "written", packed)


def test_writers_at_once(path: Path, packed: Logits, cache: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: run(path, cache), range(16)))
    assert {state for state, _ in found} <= {"written", "hit"}
    for state, logits in found:
        assert_is((state, logits), state, packed)
    only_file(cache)
    assert_is(run(path, cache), "hit", packed)


def _failing(number: int) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("call", "number"), [("posix_fallocate", errno.ENOSPC), ("fsync", errno.EIO)], ids=["full disk", "broken disk"]
)
def test_a_disk_that_takes_nothing_is_a_warning(
    path: Path,
    packed: Logits,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    number: int,
) -> None:
    monkeypatch.setattr(os, call, _failing(number))
    with caplog.at_level(logging.WARNING, "octavo"):
        assert_is(run(path, cache), f"not written: {os.strerror(number)}", packed)
    assert not list(cache.iterdir())
    (record,) = caplog.records
    assert "event=packed_cache_not_written" in record.getMessage()
    assert os.strerror(number) in record.getMessage()


def test_an_interrupt_leaves_nothing_behind(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(path, cache)
    assert not list(cache.iterdir())


def test_what_a_killed_process_left_is_removed_in_the_end(path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    old, young = cache / "old.1234.tmp", cache / "young.5678.tmp"
    for file in (old, young):
        file.touch()
    os.utime(old, (0, 0))
    run(path, cache)
    assert not old.exists()
    assert young.exists()


def test_a_place_without_a_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(
            ConfigError, match=rf"packed_cache='{place}': no directory, and none can be made there \(.+\)"
        ):
            PackedCache(place, ())


def test_mapped_weights_cannot_be_packed(tmp_path: Path) -> None:
    def program() -> Program:
        made = Program(isas()[0], 1)
        made.add_weight(16, 32)
        return made

    rows = np.ones((16, 32), np.float32)
    first, second = program(), program()
    first.pack(0, 0, 1, rows, 0)
    file = tmp_path / "packed"
    file.write_bytes(first.packed(0))
    with file.open("rb") as opened:
        assert not second.map_weights(opened.fileno(), 0, first.packed_checksum() ^ 1)
        assert second.packed(0) == bytes(first.packed_bytes)
        assert second.map_weights(opened.fileno(), 0, first.packed_checksum())
    assert second.packed(0) == first.packed(0)
    with pytest.raises(ValueError, match="mapped from a file"):
        second.pack(0, 0, 1, rows, 0)
