"""Ctrl-C between steps, never inside one: what it would tear apart would stay torn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds a Ctrl-C back until the block is done, then raises KeyboardInterrupt.

    Only Python's own handler raises in the middle of things, and only in the main thread: elsewhere, and where a caller
    has put a handler of its own, there is nothing to do.
    """
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def remember(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt
