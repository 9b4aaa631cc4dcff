"""Which backend `auto` means, and what is said when the native runtime is missing."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine import LLMEngine
from octavo.errors import ConfigError
from octavo.worker import backends


def boot(path: Path, **options: object) -> str:
    engine = LLMEngine.from_options(str(path), num_kv_blocks=8, num_threads=1, **options)
    report = str(engine.boot_report)
    engine.close()
    return report


def test_auto_is_the_native_runtime_where_there_is_no_gpu(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "GPU_DEVICES", (tiny_llama / "no such device",))
    assert " on cpu (" in boot(tiny_llama)
    assert " on cpu (" in boot(tiny_llama, device="cpu")


def test_torch_when_asked(tiny_llama: Path) -> None:
    assert " on torch " in boot(tiny_llama, backend="torch")


@pytest.mark.parametrize(("torch_finds", "wanted"), [("cpu", False), ("cuda:0", True)])
def test_auto_asks_torch_where_a_gpu_may_be(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, torch_finds: str, wanted: bool
) -> None:
    """A device file alone is not enough: torch must be able to use it."""
    monkeypatch.setattr(backends, "GPU_DEVICES", (tiny_llama,))
    monkeypatch.setattr("octavo.backends.torch.resolve_device", lambda device: torch_finds)
    assert backends._wants_gpu(EngineConfig(str(tiny_llama))) is wanted
    assert not backends._wants_gpu(EngineConfig(str(tiny_llama), device="cpu"))


def test_a_missing_native_runtime_is_told(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("octavo.backends.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "octavo._native", None)
    with caplog.at_level(logging.WARNING, "octavo"):
        report = boot(tiny_llama)
    assert " on torch " in report
    assert "the native runtime cannot be loaded" in report.splitlines()[-1]
    assert "event=native_runtime_missing" in caplog.text
    with pytest.raises(ConfigError, match=r"backend='cpu': the native runtime cannot be loaded"):
        boot(tiny_llama, backend="cpu")


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"activation_dtype": "int16"}, {"activation_dtype": "bfloat16"}]
)
def test_what_only_the_cpu_backend_does_is_refused_elsewhere(tiny_llama: Path, options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"{name}='\w+' is of backend='cpu'; leave it out with backend='torch'"):
        boot(tiny_llama, backend="torch", **options)
    assert " on cpu (" in boot(tiny_llama, backend="cpu", **options)
    assert " on torch " in boot(tiny_llama, backend="torch", quantization="none", activation_dtype="auto")


def test_int8_keys_and_values_are_of_the_cpu_backend(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8' is of backend='cpu'; .* stores float32 or bfloat16"):
        boot(tiny_llama, backend="torch", kv_cache_dtype="int8")
    assert "; KV cache int8" in boot(tiny_llama, backend="cpu", kv_cache_dtype="int8")
    assert "KV cache" not in boot(tiny_llama, backend="cpu")


def test_the_boot_report_says_what_became_of_the_packed_cache(tiny_llama: Path, tmp_path: Path) -> None:
    options = {"backend": "cpu", "packed_cache": str(tmp_path / "packed")}
    assert "(packed cache: off)\n" in boot(tiny_llama, backend="cpu")
    assert "(packed cache: written)\n" in boot(tiny_llama, **options)
    assert "(packed cache: hit)\n" in boot(tiny_llama, **options)
    with pytest.raises(ConfigError, match=r"packed_cache='.+' is of backend='cpu'"):
        boot(tiny_llama, **{**options, "backend": "torch"})
    with pytest.raises(ConfigError, match="no directory, and none can be made there"):
        boot(tiny_llama, backend="cpu", packed_cache=str(Path(__file__)))


def test_the_boot_report_says_what_the_weights_became(tiny_llama: Path) -> None:
    report = boot(tiny_llama, backend="cpu", quantization="int8", activation_dtype="int16")
    assert "8-bit (int8)" in report
    assert "int16 activations" in report
