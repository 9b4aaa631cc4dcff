"""The CPU backend: a graph as a native program, one call a step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Backend, Batch
from octavo.backends.cpu.cores import usable_cores
from octavo.backends.cpu.exchange import exchange_of
from octavo.backends.cpu.lower import check_graph, lower
from octavo.backends.cpu.native import Program, fast_table, isas, quant_formats, sampling
from octavo.backends.cpu.packed_cache import PackedCache
from octavo.backends.cpu.packing import pack, stored_width
from octavo.backends.cpu.profiler import CpuProfiler
from octavo.backends.host_memory import memory_limit
from octavo.backends.swap_file import swap_file
from octavo.collectives import Collectives
from octavo.core import BlockMove
from octavo.errors import ConfigError
from octavo.graph import Graph, KVGroup
from octavo.outputs import TokenLogprobs
from octavo.sampling import NOT_FINITE, NOTHING_LEFT, Sampled, SamplingRows
from octavo.weights import WeightTensor

BLOCK_MULTIPLE = 16  # tokens of a panel of the KV cache
MOST_THREADS = 256
_MOVES = ("copy", "swap_out", "swap_in")  # BlockMove::Kind in csrc/program.h
_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position", "num_logprobs", "target")


class CpuBackend(Backend):
    """Runs a graph in the native runtime, in bfloat16. Whatever shares a step, a row's result is the same bits.

    Args:
        graph: traced in bfloat16; its output is the logits, [S, vocabulary] in float32.
        weights: the checkpoint's tensors by internal name; packed one after another.
        quantization: None holds each matrix at its file's own width; "none" expands all to bfloat16, "int8" makes them
            int8 in groups of 32 input channels.
        activation_dtype: in products with weights in few bits: "int8" or "int16" (in groups of 32), or "bfloat16".
        kv_cache_dtype: of stored keys and values: "bfloat16", or "int8" with a float32 scale a token and KV head.
        block_size: tokens per KV block, a multiple of 16.
        num_threads: None is one for each core that the process may use.
        vocab_size: ids from here on are never sampled.
        isa: a kernel table of this machine; None is what OCTAVO_ISA names, else the fastest. All give the same bits.
        packed_cache: where packed weights are looked for, and else kept.
        on_load: called with the share of the weights that are packed, 0 to 1, as they are.
        fuse: False runs every op of the graph on its own: the same bits, slower.
        fast_math: take kernels whose results may differ from the other tables' in their last bits, where such are
            faster. The bits contract then holds on this instruction set alone.
        collectives: connects this worker with others, if graph and weights are its part of a model.
        cascade: False reads what several sequences share for each of them anew: the same bits, slower.

    Raises:
        ConfigError: something that the native runtime does not have; the message says what to use.
        ModelError: the checkpoint lacks a tensor, or one has another shape than the graph asks for.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, WeightTensor],
        *,
        kv_cache_dtype: str,
        block_size: int,
        num_threads: int | None,
        vocab_size: int,
        quantization: str | None = None,
        activation_dtype: str = "int8",
        isa: str | None = None,
        packed_cache: PackedCache | None = None,
        collectives: Collectives | None = None,
        on_load: Callable[[float], None] = lambda share: None,
        fuse: bool = True,
        fast_math: bool = False,
        cascade: bool = True,
    ) -> None:
        if kv_cache_dtype not in ("bfloat16", "int8"):
            raise ConfigError(
                f"kv_cache_dtype={kv_cache_dtype!r}: backend='cpu' stores bfloat16 or int8; use one of them, or "
                "backend='torch'"
            )
        if block_size % BLOCK_MULTIPLE:
            raise ConfigError(
                f"block_size={block_size}: backend='cpu' needs a multiple of {BLOCK_MULTIPLE}; use {BLOCK_MULTIPLE}"
            )
        check_graph(graph)
        graph.check_weights({name: tensor.shape for name, tensor in weights.items()})
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._kv_shapes = graph.kv_shapes
        self._kv_groups = graph.kv_groups
        self._kv_cache_dtype = kv_cache_dtype
        self._block_bytes = block_size * max((self._token_bytes(g.layers) for g in self._kv_groups), default=0)
        threads, self._why_threads = _resolve_threads(num_threads)
        table = _resolve_isa(isa)
        self._fast_math = ""
        if fast_math:
            table, self._fast_math = _resolve_fast_math(table)
        self._program = Program(table, threads)
        self._program.set_cascade(cascade)
        self._program.set_activations(activation_dtype)
        self._program.set_kv_cache_dtype(kv_cache_dtype)
        self._samples = collectives is None or collectives.samples
        if collectives is not None:
            self._program.set_exchange(collectives.size, exchange_of(graph, collectives))
        jobs = lower(graph, weights, self._program, fuse=fuse, quantization=quantization)
        self._precision = _describe([stored_width(job.tensor, quantization) for job in jobs], activation_dtype)
        if packed_cache is None:
            pack(self._program, jobs, on_load)
            self._packed_cache = "off"
        else:
            self._packed_cache = packed_cache.fill(
                self._program, jobs, quantization, lambda: pack(self._program, jobs, on_load)
            )
            on_load(1.0)

    @property
    def description(self) -> str:
        threads = "1 thread" if self._program.num_threads == 1 else f"{self._program.num_threads} threads"
        kv_cache = "" if self._kv_cache_dtype == "bfloat16" else "; KV cache int8"
        how = f"{self._program.isa}, {threads}: {self._why_threads}"
        return f"cpu ({how}), {self._precision}{kv_cache}{self._fast_math}"

    @property
    def packed_cache(self) -> str:
        return self._packed_cache

    @property
    def weight_bytes(self) -> int:
        return self._program.weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes(self._kv_shapes)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._kv_groups

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def shared_positions(self) -> int:
        """Positions whose keys and values the last step read once for several sequences, over all layers."""
        return self._program.shared_positions

    def memory_limit(self) -> int:
        return memory_limit()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks; pages are committed when they are first written.

        Raises:
            ConfigError: the address space does not have the room.
        """
        try:
            self._program.allocate_kv_cache(num_blocks, self._block_size)
        except MemoryError as error:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks ({num_blocks * self._block_bytes} bytes) does not fit into memory; "
                "lower num_kv_blocks or kv_cache_memory_bytes"
            ) from error

    def kv_caches(self) -> list[tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]]:
        """Keys and values of each layer, in the panels of csrc/kernels.h; shared memory.

        Bits of bfloat16 as uint16; in int8, bytes: codes, and the float32 scales of a panel's tokens.
        """
        return [self._program.kv_cache(i) for i in range(len(self._kv_shapes))]

    def _token_bytes(self, layers: Iterable[int]) -> int:
        """Of a token's keys and values in these layers."""
        shapes = (self._kv_shapes[layer] for layer in layers)
        if self._kv_cache_dtype == "int8":
            return sum(2 * heads * (head_dim + 4) for heads, head_dim in shapes)
        return sum(2 * heads * 2 * head_dim for heads, head_dim in shapes)

    def allocate_swap_space(self, num_blocks: int, directory: Path | None) -> None:
        size = num_blocks * self._block_bytes
        try:
            if directory is None or size == 0:  # of a stage without attention, and there are no empty swap files
                self._program.allocate_swap_space(num_blocks, None)
            else:
                with swap_file(directory, size) as file:  # mapped, it lives on
                    self._program.allocate_swap_space(num_blocks, file.fileno())
        except MemoryError as error:
            raise ConfigError(
                f"a swap space of {num_blocks} blocks ({size} bytes) does not fit into memory; lower swap_space_bytes"
            ) from error

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        rows = [(_MOVES.index(kind), source, destination) for kind, source, destination in moves]
        self._program.move_blocks(np.array(rows, np.int64).reshape(-1, 3))

    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled | None:
        if not self._samples:
            self._program.step(batch, None, 0, np.empty(0, np.int32), self._logits_memory(0))
            return None
        shaped = [i for i, shaping in enumerate(rows.shaping) if shaping is not None and rows.target[i] < 0]
        logits = self._logits_memory(len(shaped))
        result = self._program.step(batch, rows, self._vocab_size, np.array(shaped, np.int32), logits)
        sampled = Sampled(result[0], _logprobs(rows, *result))
        for row, i in zip(logits, shaped, strict=True):
            self._sample_shaped(row[: self._vocab_size], rows, i, sampled)
        return sampled

    def profiler(self) -> CpuProfiler:
        return CpuProfiler(self._program)

    def logits(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step and give its logits, float32 [S, vocabulary], instead of sampling; none where others sample."""
        everything = np.arange(len(batch.logit_rows) if self._samples else 0, dtype=np.int32)
        logits = self._logits_memory(len(everything))
        self._program.step(batch, None, self._vocab_size, everything, logits)
        return logits

    def _logits_memory(self, count: int) -> NDArray[np.float32]:
        return np.empty((count, self._program.vocab_size), np.float32)

    def _sample_shaped(self, logits: NDArray[np.float32], rows: SamplingRows, i: int, sampled: Sampled) -> None:
        """A row whose logits Python changes first; its logprobs are those of the model's own logits."""
        shaping = rows.shaping[i]
        if sampled.token_ids[i] == NOT_FINITE or shaping is None:
            return
        token = self._sample_one(shaping(logits), rows, i, num_logprobs=-1, target=-1)[0][0]
        if token == NOT_FINITE:
            sampled.token_ids[i], sampled.logprobs[i] = NOTHING_LEFT, None
            return
        sampled.token_ids[i] = token
        count = int(rows.num_logprobs[i])
        if count >= 0:
            _, logprobs, ranks, _, top_ids, top_logprobs = self._sample_one(logits, rows, i, count, int(token))
            sampled.logprobs[i] = TokenLogprobs(
                int(token), float(logprobs[0]), int(ranks[0]), top_ids.tolist(), top_logprobs.tolist()
            )

    def _sample_one(
        self, logits: NDArray[np.float32], rows: SamplingRows, i: int, num_logprobs: int, target: int
    ) -> tuple[NDArray[np.generic], ...]:
        columns = {name: getattr(rows, name)[i : i + 1] for name in _COLUMNS}
        columns["num_logprobs"] = np.array([num_logprobs], np.int32)
        columns["target"] = np.array([target], np.int32)
        return sampling.sample(logits[None], self._vocab_size, **columns)


def _logprobs(
    rows: SamplingRows,
    token_ids: NDArray[np.int32],
    ranks: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    top_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float64],
) -> list[TokenLogprobs | None]:
    entries: list[TokenLogprobs | None] = [None] * len(token_ids)
    for i in np.flatnonzero((rows.num_logprobs >= 0) & (token_ids >= 0)).tolist():
        count = rows.num_logprobs[i]
        entries[i] = TokenLogprobs(
            int(token_ids[i]),
            float(logprobs[i]),
            int(ranks[i]),
            top_ids[i, :count].tolist(),
            top_logprobs[i, :count].tolist(),
        )
    return entries


def _describe(widths: Sequence[str], activation_dtype: str) -> str:
    """The precision for the boot report: in what the matrices are held, and how many of them."""
    counts = Counter(widths)
    if set(counts) == {"bfloat16"}:
        return "bfloat16"
    groups = [f"{_bits(width)}-bit ({width}) {count}" for width, count in counts.most_common()]
    return f"bfloat16; matrices {', '.join(groups)}; {activation_dtype} activations"


def _bits(width: str) -> int:
    """Of a code."""
    return {"int8": 8, "bfloat16": 16}.get(width) or quant_formats()[width]


def _resolve_isa(isa: str | None) -> str:
    wanted = isa or os.environ.get("OCTAVO_ISA") or isas()[-1]
    if wanted not in isas():
        raise ConfigError(f"OCTAVO_ISA={wanted!r}: this machine has {', '.join(isas())}; use one of them")
    return wanted


def _resolve_fast_math(isa: str) -> tuple[str, str]:
    """The table to take, and what to say of it."""
    table = fast_table(isa)
    return table, f"; fast_math: {isa} has nothing faster" if table == isa else "; fast_math: bits of this table only"


def _resolve_threads(num_threads: int | None) -> tuple[int, str]:
    """The number, and where it comes from."""
    if num_threads is None:
        cores = usable_cores()
        return min(cores.number, MOST_THREADS), cores.reason
    if num_threads > MOST_THREADS:
        raise ConfigError(f"num_threads={num_threads}: backend='cpu' takes at most {MOST_THREADS}; give that or less")
    return num_threads, "as asked"
