"""The native runtime (csrc/): what octavo/backends/cpu calls."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_Place = tuple[int, int]  # buffer, first column

def isas() -> list[str]:
    """Names of the kernel tables that this machine can run, slowest first; all give the same bits."""

def stored_formats() -> list[str]:
    """Names of the formats that Program.pack_stored reads, as in octavo/weights/quants.py."""

def quant_formats() -> dict[str, int]:
    """Those of them whose rows a weight can keep, losing nothing, and the bits in which it holds a code."""

def fast_table(isa: str) -> str:
    """The table that is faster where last bits may differ from the other tables'; `isa` where there is none."""

def packing() -> str:
    """Names the way in which this build packs weights: another way has another name."""

def rotation(
    position: int, frequencies: NDArray[np.float32], factor: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position * frequencies, times factor; float32 [half] each."""

class Program:
    """A model as a flat list of native ops, and its threads. See csrc/program.h."""

    def __init__(self, isa: str, num_threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def add_buffer(self, width: int, selected: bool, stream: bool) -> int: ...
    def add_weight(self, n: int, k: int, width: str = "bfloat16") -> int:
        """`width`: "bfloat16", "int8" (made from what is packed), or one of `quant_formats()`, kept as it is."""
    def pack(self, weight: int, first_panel: int, panel_step: int, rows: NDArray[np.float32], first: int) -> None: ...
    def pack_stored(
        self, weight: int, first_panel: int, panel_step: int, format: str, rows: NDArray[np.uint8], first: int
    ) -> None: ...
    @property
    def packed_bytes(self) -> int:
        """Of all packed weights, one after the other: a whole number of 64."""
    def packed(self, weight: int) -> bytes:
        """A copy of one packed weight."""
    def packed_checksum(self) -> int:
        """Of all packed weights: 64 bits that find damage, not forgery."""
    def map_weights(self, descriptor: int, offset: int, checksum: int) -> bool:
        """Read the packed weights from a file that holds them from `offset` on, if that is their checksum.

        The file must be long enough. False where the checksum differs: nothing is changed then.
        """
    def add_vector(self, values: NDArray[np.float32]) -> int: ...
    def add_rotation(self, frequencies: tuple[float, ...], factor: float) -> int: ...
    def add_cache(self, kv_heads: int, head_dim: int, group: int) -> int: ...
    def set_exchange(
        self, num_ranks: int, exchange: Callable[[str, NDArray[np.float32], NDArray[np.float32] | None], None]
    ) -> None:
        """What is called, by one thread, where workers tell each other something; what it raises ends the step.

        exchange(kind, mine [rows, width], all): "all_reduce" fills all [ranks, rows, width], "gather" at rank 0 all
        [rows, vocabulary], "send" has mine to send, "recv" fills it. The arrays are the program's memory.
        """
    def set_vocab_size(self, vocab_size: int) -> None:
        """Of the whole model; before the first op."""
    def set_num_groups(self, num_groups: int) -> None:
        """Of the whole model's layers that share blocks."""
    def recv(self, out: _Place, width: int) -> None: ...
    def send(self, x: _Place, width: int) -> None: ...
    def all_reduce(self, x: _Place, width: int, out: _Place) -> None: ...
    def gather(self) -> None: ...
    def embed(self, weight: int, scale: float, first: int, out: _Place) -> None: ...
    def select_rows(self, x: _Place, out: _Place) -> None: ...
    def rms_norm(self, x: _Place, weight: int, groups: int, eps: float, out: _Place) -> None: ...
    def rope(self, x: _Place, rotation: int, heads: int, head_dim: int, out: _Place) -> None: ...
    def gate_mul(self, gate: _Place, up: _Place, f: str, width: int, out: _Place) -> None: ...
    def add(self, a: _Place, b: _Place, width: int, out: _Place) -> None: ...
    def store(self, k: _Place, v: _Place, cache: int) -> None: ...
    def attention(
        self, q: _Place, cache: int, heads: int, window: int, scale: float, softcap: float, out: _Place
    ) -> None: ...
    def matmul(
        self,
        x: _Place,
        weight: int,
        bias: int,
        epilogue: Literal["store", "add", "silu_mul", "gelu_mul", "float"],
        residual: _Place,
        width: int,
        out: _Place,
    ) -> None: ...
    def logits(self, x: _Place, weight: int) -> None: ...
    def softcap(self, cap: float) -> None: ...
    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None: ...
    def allocate_swap_space(self, num_blocks: int, descriptor: int | None) -> None:
        """The host tier: in memory, or in a file of at least num_blocks blocks."""
    def move_blocks(self, moves: NDArray[np.int64]) -> None:
        """Copies whole blocks, one after the other: [n, 3] of kind, source, destination.

        Kind 0 is within the cache, 1 from there to the host tier, 2 back.
        """
    @property
    def shared_positions(self) -> int:
        """Positions of the last step, over all layers, that need not be read again for each sequence."""
    def set_cascade(self, on: bool) -> None:
        """Whether what several sequences share is read once for all of them (the default); results are the same."""
    def set_activations(self, dtype: str) -> None:
        """What activations become where weights are in few bits: "int8" (the default), "int16" or "bfloat16"."""
    def set_kv_cache_dtype(self, dtype: str) -> None:
        """What keys and values are stored as, "bfloat16" (the default) or "int8"; before the cache is allocated."""
    def kv_cache(self, cache: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values as they lie, shared memory: uint16 [blocks, KV heads, panels, 16 * head_dim].

        In int8 uint8 [blocks, KV heads, panels, 16 * (head_dim + 4)].
        """
    def start_profile(self) -> None:
        """Time the ops of the steps to come, from zero."""
    def stop_profile(self) -> list[dict[str, Any]]:
        """The fields of octavo.metrics.OpProfile for each op in order, and for sampling."""
    def measure_roofline(self) -> dict[str, float]:
        """The fields of octavo.metrics.Roofline; takes about three seconds on all threads."""
    def step(
        self,
        batch: Any,
        rows: Any,
        vocab_size: int,
        copy_rows: NDArray[np.int32],
        copies: NDArray[np.float32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
        """Run one step of a Batch and sample by SamplingRows (None: only copy logits).

        Logits of `copy_rows` (ascending rows of S) go to `copies`, [copy_rows, vocabulary]. Returns token_ids, ranks,
        logprobs [S], and top_ids, top_logprobs [S, most].
        """

class sampling:
    @staticmethod
    def sample(
        logits: NDArray[np.float32], vocab_size: int, **columns: NDArray[Any]
    ) -> tuple[
        NDArray[np.int32],
        NDArray[np.float64],
        NDArray[np.int32],
        NDArray[np.int64],
        NDArray[np.int32],
        NDArray[np.float64],
    ]:
        """Sample rows of logits: token_ids, logprobs, ranks [n], offsets [n + 1], top_ids, top_logprobs."""
