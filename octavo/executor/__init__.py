"""Places the workers and hands them the plan."""

from octavo.executor.base import Executor
from octavo.executor.local import LocalExecutor

__all__ = ["Executor", "LocalExecutor"]
