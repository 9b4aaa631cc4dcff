"""The native extension, and what Python may know of it."""

from __future__ import annotations

from octavo._native import Program, fast_table, isas, packing, quant_formats, sampling, stored_formats

__all__ = ["Program", "fast_table", "isas", "packing", "quant_formats", "sampling", "stored_formats"]
