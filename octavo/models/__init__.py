"""Model families: what a checkpoint's configuration means, and the graph of each family."""

from octavo.models.hf_config import model_config
from octavo.models.registry import FAMILIES, build_graph
from octavo.models.rope import inverse_frequencies

__all__ = ["FAMILIES", "build_graph", "inverse_frequencies", "model_config"]
