"""What the engine asks of whatever runs the graph: load weights, make a KV cache, execute one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.core import BlockMove
from octavo.errors import ConfigError
from octavo.graph import KVGroup
from octavo.metrics import Profiler
from octavo.sampling import Sampled, SamplingRows

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as arrays: T tokens of R sequences, each sequence's tokens side by side.

    Layers are of G groups (`Graph.kv_groups`), and a sequence has blocks of its own for each, all of one pool. Two
    sequences, the first decoding its 6th token, the second in the middle of its prompt; block size 4, two groups, of
    which the second has a window of 2::

        token_ids      [ 42 | 11 12 13 ]      T = 4
        positions      [  5 |  4  5  6 ]
        query_starts   [  0    1         4 ]  sequence r owns rows query_starts[r] .. query_starts[r + 1] - 1
        context_lens   [  6    7 ]            tokens of the sequence in the cache once this step has stored its own
        block_tables   [[[7 2]                position p lives in block block_tables[g, r, p // 4], slot p % 4
                         [5 9]]
                        [[0 1]                0: what was there fell out of the window and was given back
                         [4 3]]]
        slot_mapping   [[  9 | 36 37 38 ]     block * block_size + slot: where this step stores K and V of each token
                        [  5 | 12 13 14 ]]
        logit_rows     [  0 ]                 rows of T whose logits are needed, ascending; one may come several times
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int64  # [G, T]
    query_starts: Int32  # [R + 1]
    context_lens: Int32  # [R]
    # [G, R, blocks of the longest]. Any block may stand where nobody looks: past a sequence's own, and before a window.
    block_tables: Int32
    logit_rows: Int32  # [S]


class Backend(ABC):
    """Holds weights and KV cache of one model (or of one worker's share) and executes steps."""

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the boot report: what runs where, at which precision, with how many threads."""

    @property
    def packed_cache(self) -> str:
        """What became of `--packed-cache`: "off", "hit", "written", or "not written" and why."""
        return "off"

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take as they are held, not as they are in the file."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""

    @property
    @abstractmethod
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The groups of layers that share blocks, in the order of `Batch.block_tables`."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache: of the tokens and layers that it holds. All blocks are alike."""

    @property
    def cache_in_ram(self) -> bool:
        """Whether the KV cache lies in the memory that a swap space without a directory takes from."""
        return True

    @abstractmethod
    def memory_limit(self) -> int:
        """Bytes that this process may use on the device that holds the KV cache."""

    @abstractmethod
    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks; on a CPU the pages are committed only when they are first written."""

    @abstractmethod
    def allocate_swap_space(self, num_blocks: int, directory: Path | None) -> None:
        """Make the host tier, room for `num_blocks` blocks that leave the cache; `allocate_kv_cache` comes first.

        Args:
            directory: of a file without a name that holds them; None is RAM.

        Raises:
            ConfigError: there is not the room, or no file can be made there.
        """

    @abstractmethod
    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Copy whole blocks before the next step, one after the other; returns when that is done."""

    @abstractmethod
    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled | None:
        """Run one step: store K and V of every token, then sample from the logits of `batch.logit_rows`.

        In each layer all K and V of the step are stored before any are read: sequences may share blocks that the step
        fills.

        `rows` and the result have one entry per logit row, in the order of `batch.logit_rows`. None: another worker
        samples, see `Collectives.samples`.
        """

    def profiler(self) -> Profiler:
        """Times the ops of steps to come.

        Raises:
            ConfigError: this backend cannot.
        """
        raise ConfigError(f"{self.description}: only backend='cpu' can be profiled; use that")
