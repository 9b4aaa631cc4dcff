"""Places the workers and hands them the plan."""

from octavo.executor.base import Executor
from octavo.executor.local import LocalExecutor
from octavo.executor.make import make_executor

__all__ = ["Executor", "LocalExecutor", "make_executor"]
