"""How the KV pool and its host tier are sized, for models whose layers all keep everything and for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig, LayerConfig, ModelConfig, RopeConfig
from octavo.errors import ConfigError
from octavo.graph import KVGroup
from octavo.worker.cache_engine import MemoryPlan, allocate, plan_memory
from octavo.worker.worker import BootReport
from tests.worker.test_model_runner import Recorder

MIB = 1 << 20
WHOLE = (KVGroup(None, (0, 1, 2)),)
GEMMA = (KVGroup(None, (2,)), KVGroup(50, (0,)), KVGroup(50, (1,)))


class Memory(Recorder):
    """A machine with 1000 MiB, of which weights take 200, and blocks of 1 MiB."""

    weight_bytes = 200 * MIB
    block_bytes = MIB
    kv_bytes_per_token = MIB // 16

    def __init__(self, groups: tuple[KVGroup, ...] = WHOLE, *, in_ram: bool = True) -> None:
        super().__init__()
        self._groups = groups
        self._in_ram = in_ram
        self.swap_space: tuple[int, Path | None] | None = None

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._groups

    @property
    def cache_in_ram(self) -> bool:
        return self._in_ram

    def memory_limit(self) -> int:
        return 1000 * MIB

    def allocate_swap_space(self, num_blocks: int, directory: Path | None) -> None:
        self.swap_space = (num_blocks, directory)


def model(max_position: int = 4096) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=9, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8,
        rms_norm_eps=1e-5, max_position=max_position, layers=(LayerConfig(RopeConfig(8, 1e4)),), attention_scale=1.0,
    )  # fmt: skip


def plan(backend: Memory, max_position: int = 4096, **options: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(model="m", **options), model(max_position), backend)


class TestPool:
    def test_half_of_what_weights_and_swap_space_leave(self) -> None:
        assert plan(Memory()).num_blocks == 400
        assert plan(Memory(), swap_space_bytes=300 * MIB).num_blocks == 250
        assert plan(Memory(), swap_space_bytes=300 * MIB, swap_directory="/tmp").num_blocks == 400
        assert plan(Memory(in_ram=False), swap_space_bytes=300 * MIB).num_blocks == 400

    def test_no_more_than_can_be_of_use(self) -> None:
        assert plan(Memory(), max_num_seqs=2, max_model_len=100).num_blocks == 2 * 7
        # Of a window of 50 and a chunk of 40, a span of 89 positions is held: at most 7 blocks, twice.
        options = {"max_num_seqs": 2, "max_model_len": 400, "max_num_batched_tokens": 40}
        assert plan(Memory(GEMMA), **options).num_blocks == 2 * (25 + 7 + 7)
        assert plan(Memory(GEMMA), **{**options, "max_model_len": 60}).num_blocks == 2 * 3 * 4

    def test_the_longest_context_is_what_fits(self) -> None:
        assert plan(Memory(), num_kv_blocks=10).max_model_len == 160
        assert plan(Memory(), max_position=100, num_kv_blocks=10).max_model_len == 100
        found = plan(Memory(GEMMA), num_kv_blocks=40, max_num_batched_tokens=40)
        assert (found.max_model_len, found.blocks_of_longest, found.full_context_requests) == (26 * 16, 40, 1.0)
        assert found.windows == (None, 50, 50)
        windows_only = plan(Memory((KVGroup(50, (0, 1, 2)),)), num_kv_blocks=7, max_num_batched_tokens=40)
        assert windows_only.max_model_len == 4096  # however long: it never holds more

    def test_a_context_that_does_not_fit(self) -> None:
        options = {"num_kv_blocks": 40, "max_num_batched_tokens": 40}
        assert plan(Memory(GEMMA), max_model_len=416, **options).max_model_len == 416
        with pytest.raises(ConfigError, match=r"max_model_len=417 .* 40 blocks \(416 tokens\); lower it to 416"):
            plan(Memory(GEMMA), max_model_len=417, **options)

    def test_not_a_single_token(self) -> None:
        with pytest.raises(
            ConfigError, match=r"pool of 2 blocks .* each of the model's 3 groups of layers; .* 3 blocks"
        ):
            plan(Memory(GEMMA), num_kv_blocks=2)

    def test_not_a_single_block(self) -> None:
        with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes=9: one block of 16 tokens alone takes 1048576"):
            plan(Memory(), kv_cache_memory_bytes=9)
        with pytest.raises(
            ConfigError, match=r"no memory is left .* the weights take 209715200, swap space in RAM 838860800"
        ):
            plan(Memory(), swap_space_bytes=800 * MIB)


class TestSwapSpace:
    def test_whole_blocks(self) -> None:
        backend = Memory()
        config = EngineConfig(model="m", swap_space_bytes=7 * MIB + 5)
        memory = plan_memory(config, model(), backend)
        allocate(memory, backend)
        assert (memory.num_swap_blocks, memory.swap_bytes, backend.swap_space) == (7, 7 * MIB, (7, None))
        config = EngineConfig(model="m", swap_space_bytes=2 * MIB, swap_directory="/a/b")
        allocate(plan_memory(config, model(), backend), backend)
        assert backend.swap_space == (2, Path("/a/b"))

    def test_none(self) -> None:
        backend = Memory()
        memory = plan_memory(EngineConfig(model="m"), model(), backend)
        allocate(memory, backend)
        assert memory.num_swap_blocks == 0
        assert backend.swap_space is None

    def test_less_than_a_block(self) -> None:
        with pytest.raises(
            ConfigError, match=r"swap_space_bytes=5: one block .* takes 1048576 bytes; give that or more"
        ):
            plan(Memory(), swap_space_bytes=5)

    def test_a_host_tier_beyond_the_memory(self) -> None:
        """Also where the pool's size is given: pages are committed late, and the process would end much later."""
        beyond = {"num_kv_blocks": 10, "swap_space_bytes": 1001 * MIB}
        with pytest.raises(ConfigError, match=r"swap_space_bytes=1049624576: .* 1048576000 bytes of memory; give less"):
            plan(Memory(), **beyond)
        assert plan(Memory(), swap_directory="/x", **beyond).num_swap_blocks == 1001
        assert plan(Memory(in_ram=False), **beyond).num_swap_blocks == 1001


class TestBootReport:
    def report(self, memory: MemoryPlan) -> BootReport:
        return BootReport("m", "llama", "recorder", 1.0, "off", memory, "a note")

    def test_a_plain_model(self) -> None:
        report = self.report(plan(Memory(), num_kv_blocks=10))
        assert str(report).splitlines() == [
            "m (llama) on recorder, loaded in 1.0 s (packed cache: off)",
            "  weights 200.0 MiB; KV 64.0 KiB a token; pool of 10 blocks x 16 tokens, 10.0 MiB at most "
            "(process limit 1000.0 MiB)",
            "  context 160 tokens; 1.0 requests of that length fit at once",
            "  a note",
        ]

    def test_windows_and_swap_space(self) -> None:
        options = {"num_kv_blocks": 40, "swap_space_bytes": 512 * MIB}
        text = str(self.report(plan(Memory(GEMMA), **options)))
        assert "\n  a block holds 16 tokens of 1 of 3 layers, of which 2 keep 50 tokens\n" in text
        assert "\n  swap: 512.0 MiB in RAM (512 blocks)\n" in text
        assert "512.0 MiB in a file in /x (" in str(self.report(plan(Memory(), swap_directory="/x", **options)))

    def test_fields(self) -> None:
        fields = self.report(plan(Memory(GEMMA), num_kv_blocks=40, swap_space_bytes=5 * MIB)).fields()
        assert (fields["windows"], fields["block_bytes"], fields["kv_bytes"]) == ([None, 50, 50], MIB, 40 * MIB)
        assert (fields["num_swap_blocks"], fields["swap_bytes"], fields["swap_directory"]) == (5, 5 * MIB, None)
