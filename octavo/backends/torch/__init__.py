"""The torch backend, imported only where it is used: it needs torch."""

from octavo.backends.torch.backend import TorchBackend, resolve_device

__all__ = ["TorchBackend", "resolve_device"]
