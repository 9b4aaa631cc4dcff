"""What the engine says of itself."""

from octavo.metrics.log import configure_logging, log_event
from octavo.metrics.profile import OpProfile, Profiler, Roofline, merge

__all__ = ["OpProfile", "Profiler", "Roofline", "configure_logging", "log_event", "merge"]
