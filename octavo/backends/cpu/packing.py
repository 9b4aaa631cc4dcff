"""Weights on their way from the file into the program: expanded a few rows at a time, so that memory peaks stay low."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu.native import Program, quant_formats, stored_formats
from octavo.backends.cpu.steps import PANEL
from octavo.weights import WeightTensor
from octavo.weights.quants import dequantize

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PART_BYTES = 2 << 20  # of float32 rows expanded at a time: they stay in a cache until they are packed


@dataclass(frozen=True, slots=True)
class PackingJob:
    """A tensor to be packed into panels first_panel, first_panel + panel_step, ... of a weight of the program."""

    weight: int
    first_panel: int
    panel_step: int
    tensor: WeightTensor


def stored_width(tensor: WeightTensor, quantization: str | None) -> str:
    """How a matrix is held: "bfloat16", "int8", or the format of its file, whose codes and scales stay as they are."""
    if quantization == "int8":
        return "int8"
    return tensor.dtype if quantization is None and tensor.dtype in quant_formats() else "bfloat16"


def pack(program: Program, jobs: Sequence[PackingJob], on_load: Callable[[float], None]) -> None:
    """Packs all weights on as many threads as the program has.

    The program itself reads the common formats; others are expanded by numpy. Both release the GIL as they work.

    Args:
        on_load: called with the share that is packed, 0 to 1, in the caller's thread.

    Raises:
        ModelError: a tensor is of a type that octavo cannot read.
    """

    known = stored_formats()

    def pack_rows(job: PackingJob, first: int, raw: Bytes) -> int:
        """Returns how many bytes of the file that were."""
        if job.tensor.dtype in known:
            program.pack_stored(job.weight, job.first_panel, job.panel_step, job.tensor.dtype, raw, first)
        else:
            rows = np.ascontiguousarray(dequantize(raw, job.tensor.dtype))
            program.pack(job.weight, job.first_panel, job.panel_step, rows, first)
        return raw.nbytes

    done, total = 0, sum(job.tensor.nbytes for job in jobs)
    parts = ((job, first, raw) for job in jobs for first, raw in _parts(job.tensor))
    with ThreadPoolExecutor(program.num_threads) as threads:
        running = deque(threads.submit(pack_rows, *part) for part in islice(parts, 4 * program.num_threads))
        while running:
            done += running.popleft().result()
            on_load(done / total)
            running.extend(threads.submit(pack_rows, *part) for part in islice(parts, 1))


def _parts(tensor: WeightTensor) -> Iterator[tuple[int, Bytes]]:
    """The stored rows of a matrix, whole panels of them at a time, each time with the number of the first."""
    raw = tensor.raw
    n, k = tensor.shape
    size = max(1, PART_BYTES // (4 * k * PANEL)) * PANEL
    for first in range(0, n, size):
        yield first, np.ascontiguousarray(raw[first : first + size])  # of a part with some columns, rows lie apart


def round_to_bfloat16(x: Float32) -> Float32:
    """Rounded to the nearest bfloat16, ties to even, and still float32; x must be finite."""
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
