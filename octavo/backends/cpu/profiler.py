"""Profiles of a native program."""

from __future__ import annotations

from octavo.backends.cpu.native import Program
from octavo.metrics import OpProfile, Roofline


class CpuProfiler:
    """A `Profiler` of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def start(self) -> None:
        self._program.start_profile()

    def stop(self) -> list[OpProfile]:
        return [OpProfile(**fields) for fields in self._program.stop_profile()]

    def measure_roofline(self) -> Roofline:
        return Roofline(**self._program.measure_roofline())
