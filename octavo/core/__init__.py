"""Who runs next, and in which blocks: plain Python, no tensors."""

from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool
from octavo.core.plan import NewSequence, StepPlan, StepResult
from octavo.core.policy import Policy, make_policy
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence, Status

__all__ = [
    "BlockManager",
    "BlockPool",
    "NewSequence",
    "Policy",
    "Scheduler",
    "Sequence",
    "Status",
    "StepPlan",
    "StepResult",
    "make_policy",
]
