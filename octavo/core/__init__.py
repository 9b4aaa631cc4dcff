"""Who runs next, and in which blocks: plain Python, no tensors."""

from octavo.core.beam_search import Beam, BeamGroup, Hypothesis
from octavo.core.block_manager import BlockManager, most_blocks
from octavo.core.block_pool import BlockPool
from octavo.core.plan import NOTHING, BlockMove, NewSequence, StepPlan, StepResult
from octavo.core.policy import Policy, make_policy
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence, Status
from octavo.core.stats import KVSnapshot, SchedulerStats, SequenceBlocks

__all__ = [
    "NOTHING",
    "Beam",
    "BeamGroup",
    "BlockManager",
    "BlockMove",
    "BlockPool",
    "Hypothesis",
    "KVSnapshot",
    "NewSequence",
    "Policy",
    "Scheduler",
    "SchedulerStats",
    "Sequence",
    "SequenceBlocks",
    "Status",
    "StepPlan",
    "StepResult",
    "make_policy",
    "most_blocks",
]
