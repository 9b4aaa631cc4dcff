"""The stateful end of the engine: weights, KV cache, request slots."""

from octavo.worker.cache_engine import MemoryPlan
from octavo.worker.parts import Place, part_of
from octavo.worker.worker import BootReport, Worker

__all__ = ["BootReport", "MemoryPlan", "Place", "Worker", "part_of"]
