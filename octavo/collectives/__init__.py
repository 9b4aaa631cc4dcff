"""What the workers of one model tell each other in the middle of a step."""

from octavo.collectives.base import Buffer, CollectiveError, Collectives

__all__ = ["Buffer", "CollectiveError", "Collectives"]
