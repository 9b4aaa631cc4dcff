"""The torch backend: walks the graph and calls one torch function per node. In float32 on a CPU it is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.base import Backend, Batch
from octavo.backends.host_memory import memory_limit
from octavo.backends.swap_file import swap_file
from octavo.backends.torch.ops import OPS
from octavo.backends.torch.step import KVCache, Step
from octavo.collectives import Collectives
from octavo.core import BlockMove
from octavo.errors import ConfigError
from octavo.graph import Graph, KVGroup, Node
from octavo.sampling import Sampled, Sampler, SamplingRows
from octavo.weights import WeightTensor

LOGITS_BYTES = 64 << 20  # of float32 logits held at a time
_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Call:
    """A node, ready to run."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]
    attrs: Mapping[str, Any]
    output: str
    last_uses: tuple[str, ...]  # values that no later call reads


class TorchBackend(Backend):
    """Runs a graph with torch.

    Args:
        graph: its output is the logits, [S, vocabulary] in float32; or it is one worker's part of such a graph.
        weights: the checkpoint's tensors by internal name, or this worker's parts of them; each is expanded, converted
            and copied at once.
        device: "auto", or any device that torch can compute on here, such as "cpu" or "cuda:0".
        dtype: of the activations: what the graph was traced with.
        kv_cache_dtype: of stored keys and values, "float32" or "bfloat16".
        block_size: tokens per KV block.
        num_threads: of torch's operators. torch keeps this number per process and calling thread, so it is set in
            every `execute` that finds another; None leaves torch's own choice.
        sampler: draws tokens from the logits.
        collectives: connects this worker with the others, if the graph is a part.
        on_load: called with the share of the weights that are loaded, 0 to 1, as they are.

    Raises:
        ConfigError: the device does not exist.
        ModelError: the checkpoint lacks a tensor, or one has another shape than the graph asks for.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, WeightTensor],
        *,
        device: str,
        dtype: str,
        kv_cache_dtype: str,
        block_size: int,
        num_threads: int | None,
        sampler: Sampler,
        collectives: Collectives | None = None,
        on_load: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._device = torch.device(resolve_device(device))
        graph.check_weights({name: tensor.shape for name, tensor in weights.items()})
        self._weights: dict[str, torch.Tensor] = {}
        for weight in graph.weights.values():
            self._weights[weight.name] = _load(weights[weight.name], _DTYPES[weight.dtype], self._device)
            on_load(len(self._weights) / len(graph.weights))
        self._dtype = dtype
        self._kv_cache_dtype = kv_cache_dtype
        self._block_size = block_size
        self._num_threads = num_threads
        self._sampler = sampler
        self._collectives = collectives
        self._vocab_size = graph.output.width or 0
        self._kv_shapes = graph.kv_shapes
        self._kv_groups = graph.kv_groups
        # Of each layer's rows a block is a whole number: they can then be counted through all blocks.
        row = lcm(*(heads * head_dim for heads, head_dim in self._kv_shapes.values()))
        self._block_elements = -(-block_size * graph.kv_block_width // row) * row
        calls = _calls(graph, self._weights)
        head = next((i for i, node in enumerate(graph.nodes) if node.op == "lm_head"), len(calls))
        self._body, self._head = calls[:head], calls[head:]  # the head, if there is one, runs for some rows at a time
        self._pool = self._host = torch.empty(0)  # [blocks, elements of a block], once they are allocated
        self.kv_caches: dict[int, KVCache] = {}  # by layer; filled by allocate_kv_cache

    @property
    def description(self) -> str:
        if self._device.type == "cuda":
            where = f"{self._device} ({torch.cuda.get_device_name(self._device)})"
        else:
            where = f"{self._device} with {self._num_threads or torch.get_num_threads()} threads"
        return f"torch {torch.__version__} on {where}, {self._dtype}, KV cache {self._kv_cache_dtype}"

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def kv_bytes_per_token(self) -> int:
        itemsize = _DTYPES[self._kv_cache_dtype].itemsize
        return sum(2 * heads * head_dim * itemsize for heads, head_dim in self._kv_shapes.values())

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._kv_groups

    @property
    def block_bytes(self) -> int:
        return self._block_elements * _DTYPES[self._kv_cache_dtype].itemsize

    @property
    def cache_in_ram(self) -> bool:
        return self._device.type == "cpu"

    def memory_limit(self) -> int:
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return free + torch.cuda.memory_reserved(self._device)
        return memory_limit()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks.

        Raises:
            ConfigError: the device does not have the memory.
        """
        dtype = _DTYPES[self._kv_cache_dtype]
        try:
            self._pool = torch.empty((num_blocks, self._block_elements), dtype=dtype, device=self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks ({num_blocks * self.block_bytes} bytes) does not fit on "
                f"{self._device}; lower num_kv_blocks or kv_cache_memory_bytes"
            ) from error
        for i, group in enumerate(self._kv_groups):
            begin = 0
            for layer in group.layers:
                heads, head_dim = self._kv_shapes[layer]
                size = self._block_size * heads * head_dim
                keys, values = (
                    self._pool[:, first : first + size].view(num_blocks, self._block_size, heads, head_dim)
                    for first in (begin, begin + size)
                )
                self.kv_caches[layer] = KVCache(keys, values, i)
                begin += 2 * size

    def allocate_swap_space(self, num_blocks: int, directory: Path | None) -> None:
        dtype, size = self._pool.dtype, num_blocks * self.block_bytes
        shape = (num_blocks, self._block_elements)
        try:
            if directory is None:
                self._host = torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
            else:
                with swap_file(directory, size) as file:  # mapped, it lives on
                    self._host = (
                        torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,))).view(dtype).view(shape)
                    )
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"a swap space of {num_blocks} blocks ({size} bytes) does not fit into memory; lower swap_space_bytes"
            ) from error

    @torch.inference_mode()
    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        for kind, source, destination in moves:
            origin = self._host if kind == "swap_in" else self._pool
            target = self._host if kind == "swap_out" else self._pool
            target[destination].copy_(origin[source], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled | None:
        samples = self._collectives is None or self._collectives.samples
        parts = [
            self._sampler(logits, rows.slice(first, first + len(logits)))
            for first, logits in self.forward(batch)
            if samples
        ]
        return Sampled.concatenate(parts) if samples else None

    def forward(self, batch: Batch) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Run one step: the layers before the first slice of logits, then a slice of about 64 MB at a time.

        Yields:
            The first of the slice's logit rows, and the logits, float32 [n, vocabulary]: of a worker that does not
            sample, only its own columns of them, if it has any.
        """
        if self._num_threads is not None and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        step = Step(batch, self.kv_caches, self._block_size, self._device, _DTYPES[self._dtype], self._collectives)
        hidden = self._run(self._body, step, {"token_ids": step.token_ids, "positions": step.positions})
        if not self._head:
            return
        size = max(1, LOGITS_BYTES // (4 * self._vocab_size))
        for first in range(0, len(hidden), size):
            logits = self._run(self._head, step, {self._head[0].inputs[0]: hidden[first : first + size]})
            yield first, logits.cpu().numpy()

    @torch.inference_mode()
    def _run(self, calls: list[_Call], step: Step, values: dict[str, torch.Tensor]) -> torch.Tensor:
        for call in calls:
            inputs = (values[name] for name in call.inputs)
            values[call.output] = call.function(step, *inputs, *call.weights, **call.attrs)
            for name in call.last_uses:
                del values[name]
        return values[calls[-1].output]


def resolve_device(device: str) -> str:
    """The torch device that `device` asks for; "auto" is cuda where there is one, else cpu.

    Raises:
        ConfigError: torch knows no such device, or cannot compute on it here.
    """
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises each, by kind of device
        reason = str(error).partition("\n")[0][:120]
        raise ConfigError(f"device={device!r} cannot be used here ({reason}); use auto or cpu") from error
    return str(torch.device(device))


def _load(tensor: WeightTensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy of its own: what `to_float32` gives read-only is a view of the file."""
    return torch.from_numpy(np.require(tensor.to_float32(), requirements=["C", "W"])).to(device, dtype)


def _calls(graph: Graph, weights: Mapping[str, torch.Tensor]) -> list[_Call]:
    last_reader = {value.name: node for node in graph.nodes for value in node.inputs}

    def call(node: Node) -> _Call:
        inputs = tuple(value.name for value in node.inputs)
        last_uses = tuple(name for name in dict.fromkeys(inputs) if last_reader[name] is node)
        own = tuple(weights[weight.name] for weight in node.weights)
        return _Call(OPS[_op(node)], inputs, own, _arguments(node), node.output.name, last_uses)

    return [call(node) for node in graph.nodes]


def _op(node: Node) -> str:
    return "partial_linear" if node.op == "linear" and node.output.dtype == "float32" else node.op


def _arguments(node: Node) -> Mapping[str, Any]:
    """What an op's function has to be told beside its inputs and weights."""
    match node.op:
        case "all_reduce":
            return {"dtype": _DTYPES[node.output.dtype]}
        case "recv":
            return {"width": node.output.width}
        case _:
            return node.attrs
