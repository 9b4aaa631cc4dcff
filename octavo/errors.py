"""Every error that octavo raises on purpose.

The message of each is one line that names the value, the limit and what to do next, so that the CLI can print it as
it is and the server can put it into a response.
"""


class OctavoError(Exception):
    """Base of all errors that octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An engine option, or a combination of options, cannot be honoured."""


class ModelError(OctavoError):
    """A model cannot be found, read or understood; nothing was loaded."""


class RequestError(OctavoError, ValueError):
    """One request is refused or failed; every other request goes on."""


class QueueFullError(OctavoError):
    """As many requests wait as may; nothing of this one was queued."""

    def __init__(self, message: str, retry_after: int) -> None:
        """`retry_after`: seconds after which there is likely to be room, from 1 on."""
        super().__init__(message)
        self.retry_after = retry_after
