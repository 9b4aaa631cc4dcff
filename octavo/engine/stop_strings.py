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
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that `text` completed: nothing may follow that.

        Without `check` a stop string that ends in `text` does not count; one that only begins there may.
        """
        if not self._matchers:
            return text, None
        ends = [(matcher.feed(text, check=check), matcher.stop) for matcher in self._matchers]
        whole = self._held + text
        met = min(((end, -len(stop), stop) for end, stop in ends if end is not None), default=None)
        if met is not None:
            end, _, stop = met
            end += len(self._held)
            self._held = ""
            return whole[: end if self._include else end - len(stop)], stop
        shown = len(whole) - max(matcher.length for matcher in self._matchers)
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What is still held, once the text has ended otherwise."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How much of one stop string the text ends with (Knuth, Morris, Pratt 1977): a few operations a character,
    whatever text and stop string are. The table is made as far as the text has come into the stop string.

    Attributes:
        length: of the longest end of the text that begins `stop` without being all of it.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = [0, 0]  # by length: of the longest proper end of so much of `stop` that begins it too

    def feed(self, text: str, *, check: bool) -> int | None:
        """Where in `text` the stop string is complete for the first time; without `check`, that is passed over."""
        stop, length, place = self.stop, self.length, 0
        while place < len(text):
            if length == 0:  # nearly always
                place = text.find(stop[0], place)
                if place < 0:
                    break
            length = self._longer(length, text[place])
            place += 1
            if length == len(stop):
                if check:
                    return place
                length = self._border(length)
        self.length = length
        return None

    def _longer(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._border(length)
        return length + (self.stop[length] == character)

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) <= length:
            borders.append(self._longer(borders[-1], self.stop[len(borders) - 1]))
        return borders[length]
