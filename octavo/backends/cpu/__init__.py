"""The CPU backend, imported only where it is used: it needs the native extension, octavo._native."""

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.cpu.native import isas

__all__ = ["CpuBackend", "isas"]
