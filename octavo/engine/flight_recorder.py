"""What the engine process is doing, in memory that outlives it."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Sequence

_BEGUN, _DONE, _BEATS, _COUNT, _IDS = range(5)
_WORD = 8  # bytes


class FlightRecorder:
    """A few words shared by the front-end and the engine process, written before and after each step.

    ::

        words of 8 bytes   [ steps begun ][ steps done ][ beats ][ n ][ seq_id 0 ] ... [ seq_id n - 1 ]

    A message may be lost with the process that was about to send it. What was written here is not: when the engine has
    died, this says whether it died in a step, and with which sequences.
    """

    def __init__(self, file: int) -> None:
        """Maps what `create` made; the descriptor is closed."""
        try:
            self._map = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self._words = memoryview(self._map).cast("q")

    @staticmethod
    def create(max_num_seqs: int) -> int:
        """A descriptor of the memory for steps of so many sequences; pages are committed as they are written."""
        file = os.memfd_create("octavo-flight-recorder")
        try:
            os.ftruncate(file, (_IDS + max_num_seqs) * _WORD)
        except OSError:
            os.close(file)
            raise
        return file

    def begin_step(self, seq_ids: Sequence[int]) -> None:
        """A step is begun.

        Args:
            seq_ids: of all steps that are in flight then; a sequence may be in several.
        """
        self._write(seq_ids)
        self._words[_BEGUN] += 1

    def _write(self, seq_ids: Sequence[int]) -> None:
        seq_ids = list(dict.fromkeys(seq_ids))
        self._words[_IDS : _IDS + len(seq_ids)] = memoryview(array("q", seq_ids))
        self._words[_COUNT] = len(seq_ids)

    def end_step(self, in_flight: Sequence[int] = ()) -> None:
        """The oldest step is done.

        Args:
            in_flight: the seq_ids of steps that have begun meanwhile.
        """
        self._write(in_flight)
        self._words[_DONE] += 1

    def beat(self) -> None:
        """The engine waits for workers elsewhere, and they get on."""
        self._words[_BEATS] += 1

    @property
    def num_beats(self) -> int:
        return self._words[_BEATS]

    @property
    def num_steps(self) -> int:
        """That are done."""
        return self._words[_DONE]

    @property
    def in_step(self) -> list[int]:
        """The seq_ids of the steps that have begun and are not done."""
        words = self._words
        if words[_BEGUN] == words[_DONE]:
            return []
        return words[_IDS : _IDS + words[_COUNT]].tolist()

    def close(self) -> None:
        self._words.release()
        self._map.close()
