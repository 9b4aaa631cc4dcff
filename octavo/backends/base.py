"""What the engine asks of whatever runs the graph: load weights, make a KV cache, execute one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.metrics import Profiler
from octavo.sampling import Sampled, SamplingRows

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as arrays: T tokens of R sequences, each sequence's tokens side by side.

    Two sequences, the first decoding its 6th token, the second in the middle of its prompt, block size 4::

        token_ids      [ 42 | 11 12 13 ]      T = 4
        positions      [  5 |  4  5  6 ]
        query_starts   [  0    1         4 ]  sequence r owns rows query_starts[r] .. query_starts[r + 1] - 1
        context_lens   [  6    7 ]            tokens of the sequence in the cache once this step has stored its own
        block_tables   [[7 2]                 position p lives in block block_tables[r, p // 4], slot p % 4
                        [5 9]]
        slot_mapping   [  9 | 36 37 38 ]      block * block_size + slot: where this step stores K and V of each token
        logit_rows     [  0 ]                 rows of T whose logits are needed, ascending; one may come several times
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int64  # [T]
    query_starts: Int32  # [R + 1]
    context_lens: Int32  # [R]
    block_tables: Int32  # [R, blocks of the longest]; entries past a sequence's own blocks are 0
    logit_rows: Int32  # [S]


class Backend(ABC):
    """Holds weights and KV cache of one model (or of one worker's share) and executes steps."""

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the boot report: what runs where, at which precision, with how many threads."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take as they are held, not as they are in the file."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""

    @abstractmethod
    def memory_limit(self) -> int:
        """Bytes that this process may use on the device that holds the KV cache."""

    @abstractmethod
    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks; on a CPU the pages are committed only when they are first written."""

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, of all layers, before the next step: (source, destination) pairs, one after the other."""

    @abstractmethod
    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled:
        """Run one step: store K and V of every token, then sample from the logits of `batch.logit_rows`.

        In each layer all K and V of the step are stored before any are read: sequences may share blocks that the step
        fills.

        `rows` and the result have one entry per logit row, in the order of `batch.logit_rows`.
        """

    def profiler(self) -> Profiler:
        """Times the ops of steps to come.

        Raises:
            ConfigError: this backend cannot.
        """
        raise ConfigError(f"{self.description}: only backend='cpu' can be profiled; use that")
