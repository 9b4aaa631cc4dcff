"""The CPU backend, imported only where it is used: it needs the native extension, octavo._native."""

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.cpu.native import isas
from octavo.backends.cpu.packed_cache import PackedCache

__all__ = ["CpuBackend", "PackedCache", "isas"]
