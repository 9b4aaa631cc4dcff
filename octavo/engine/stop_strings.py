"""Where a text ends: stop strings, however they are spread over tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may still become one.

    ::

        stop "END":   feed "a lon"  -> "a lon"
                      feed "g EN"   -> "g "       "EN" is held
                      feed "V"      -> "ENV"      it was none
                      feed " EN"    -> " "
                      feed "Done"   -> ""         stopped: the text is "a long ENV "

    A text is read character by character: the stop string that is complete first wins, and of those that end at one
    character the longest. So the result does not depend on how the text is cut into chunks. Held text is shorter than
    the longest stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` keeps the stop string in the text."""
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that `text` completed: nothing may follow that.

        Without `check` a stop string that ends in `text` does not count; one that only begins there may.
        """
        if not self._stops:
            return text, None
        whole = self._held + text
        match = self._first(whole) if check else None
        if match is not None:
            end, stop = match
            self._held = ""
            return whole[: end if self._include else end - len(stop)], stop
        shown = len(whole) - max(_overlap(whole, stop) for stop in self._stops)
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What is still held, once the text has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first(self, whole: str) -> tuple[int, str] | None:
        """The stop string that ends first past what was held, and its end."""
        found = []
        for stop in self._stops:
            start = whole.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), stop))
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
