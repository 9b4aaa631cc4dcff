"""A roofline plot (Williams, Waterman and Patterson, 2009, doi:10.1145/1498765.1498785) of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from octavo.errors import ConfigError, OctavoError
from octavo.metrics import OpProfile, Roofline

_LEAST_SHARE = 0.002  # of a phase's time: less is not drawn


def require_matplotlib() -> None:
    """
    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib, which is not installed: pip install 'octavo[plot]'")


def plot(path: Path, title: str, phases: Mapping[str, Sequence[OpProfile]], roofline: Roofline) -> None:
    """One disc an op with arithmetic, its area the share of its phase's time.

    Raises:
        OctavoError: the file cannot be written.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots()
    shown = {
        name: [op for op in ops if op.flops > 0 and op.seconds > _LEAST_SHARE * sum(each.seconds for each in ops)]
        for name, ops in phases.items()
    }
    intensities = [op.flops / op.bytes for ops in shown.values() for op in ops]
    ridge = roofline.product_flops / roofline.weights_bytes
    low, high = min([*intensities, ridge / 10]) / 2, max([*intensities, ridge]) * 4
    for bandwidth, style, label in (
        (roofline.weights_bytes, "-", "read"),
        (roofline.product_bytes, ":", "matrix x vector"),
    ):
        knee = roofline.product_flops / bandwidth
        axes.plot(
            [low, knee, high],
            [low * bandwidth / 1e9, roofline.product_flops / 1e9, roofline.product_flops / 1e9],
            f"k{style}",
            linewidth=1,
            label=f"{label} {bandwidth / 1e9:.1f} GB/s; peak {roofline.product_flops / 1e9:.0f} GFLOP/s",
        )
    number = count(1)
    for color, (name, ops) in zip(("tab:blue", "tab:orange"), shown.items(), strict=True):
        total = sum(op.seconds for op in phases[name])
        for op in ops:
            point = op.flops / op.bytes, op.flops / op.seconds / 1e9
            i = next(number)  # names would cover each other
            label = f"{i}  {name}: {op.kind} {op.shape}, {op.seconds / total:.0%}"
            axes.scatter(*point, s=20 + 1500 * op.seconds / total, color=color, alpha=0.5, label=label)
            axes.annotate(str(i), point, fontsize=7, ha="center", va="center")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s", title=title)
    axes.grid(True, which="major", alpha=0.3)
    legend = axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([40])
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise OctavoError(f"cannot write {path}: {error.strerror}") from error
