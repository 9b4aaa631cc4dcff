"""What the engine says of itself."""

from octavo.metrics.log import configure_logging, log_event

__all__ = ["configure_logging", "log_event"]
