"""The ops between workers. Like all ops: `function(step, *inputs, **attrs)`."""

from __future__ import annotations

import torch

from octavo.backends.torch.step import Step
from octavo.collectives import Buffer, Collectives


def all_reduce(step: Step, x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    collectives = _collectives(step)
    everyone = x.new_empty((collectives.size, *x.shape))
    collectives.all_gather(_buffer(x.contiguous()), _buffer(everyone))
    total = everyone[0]
    for part in everyone[1:]:  # in rank order, so that the same number of workers gives the same bits
        total = total + part
    return total.to(dtype)


def gather(step: Step, x: torch.Tensor, *, widths: tuple[int, ...]) -> torch.Tensor:
    """At the other ranks, their own columns."""
    collectives = _collectives(step)
    others = [x.new_empty((len(x), width)) for width in widths[1:]] if collectives.rank == 0 else []
    collectives.gather(_buffer(x.contiguous()), [_buffer(other) for other in others])
    return torch.cat([x, *others], dim=1)


def send(step: Step, x: torch.Tensor) -> torch.Tensor:
    _collectives(step).send(_buffer(x.contiguous()))
    return x


def recv(step: Step, *, width: int) -> torch.Tensor:
    x = torch.empty((len(step.token_ids), width), dtype=torch.float32, device=step.token_ids.device)
    _collectives(step).recv(_buffer(x))
    return x


def _collectives(step: Step) -> Collectives:
    assert step.collectives is not None, "this graph is one worker's part"
    return step.collectives


def _buffer(x: torch.Tensor) -> Buffer:
    """The same memory, as a numpy array where that can be."""
    return x.numpy() if x.device.type == "cpu" else x
