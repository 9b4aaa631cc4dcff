"""Beam search over token ids: which beams go on, which are finished, when it is over. No scheduler, no text.

It does what transformers' does (`generate(num_beams=...)`), in float64: the same candidates, the same rules for when a
beam is finished and when the search is over, the same scores.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from octavo.outputs import FinishReason, TokenLogprobs
from octavo.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation that is still open."""

    token_ids: list[int]  # generated
    logprob: float  # summed over them


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that goes on no more."""

    token_ids: list[int]  # generated, with the one that ended it
    logprob: float  # summed over them
    score: float  # that, divided by length ** length_penalty
    finish_reason: FinishReason


class BeamGroup:
    """The beams of one request.

    One step, with a width of 2, a length penalty of 0, and E as the token that ends a beam::

        live              candidates, all together, best first
        0  "the cat"  -1  0 + E      -1.2   is finished
        1  "a dog"    -2  0 + "sat"  -1.9   goes on, as 0
                          1 + "ran"  -2.5   goes on, as 1
                          1 + E      -2.6   is dropped
                          ...

    A token that ends a beam counts among the best 2 alone; the best 2 of the other candidates always go on.
    """

    def __init__(self, params: BeamSearchParams, *, max_tokens: int, stop_token_ids: Collection[int]) -> None:
        """
        Args:
            max_tokens: that a beam may have; the request's own limit, or less where the context ends before.
            stop_token_ids: those that end a beam, end-of-sequence tokens included.
        """
        self.params = params
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.live = [Beam([], 0.0)]  # best first, all equally long; none when the search is over
        self.finished: list[Hypothesis] = []  # best first, the best `beam_width` of all

    @property
    def num_candidates(self) -> int:
        """How many of a beam's most likely next tokens can matter: all of the width may go on from one beam."""
        return self.params.beam_width + len(self.stop_token_ids)

    def advance(self, candidates: Iterable[TokenLogprobs]) -> list[tuple[int, int]]:
        """Takes the `num_candidates` most likely next tokens of each live beam, in the order of `live`.

        Returns:
            (index of the parent in `live` as it was, token) of each beam that goes on, in the order of `live` as it is
            now; empty when the search is over. A parent may have several children, or none.
        """
        width, stops, live = self.params.beam_width, self.stop_token_ids, self.live
        ranked = self._ranked(candidates)
        is_last = len(live[0].token_ids) + 1 == self.max_tokens
        for cost, parent, token in ranked[:width]:
            if token in stops or is_last:
                reason: FinishReason = "stop" if token in stops else "length"
                self._finish(Beam([*live[parent].token_ids, token], -cost), reason)
        going_on = [] if is_last else [candidate for candidate in ranked if candidate[2] not in stops][:width]
        self.live = [Beam([*live[parent].token_ids, token], -cost) for cost, parent, token in going_on]
        if self._is_over():
            self.live = []
        return [(parent, token) for _, parent, token in going_on] if self.live else []

    def best(self, reason: FinishReason) -> list[Hypothesis]:
        """The best `beam_width`, best first; those that are still open are ended for `reason`."""
        ended = [self._hypothesis(beam, reason) for beam in self.live]
        return sorted(self.finished + ended, key=lambda one: -one.score)[: self.params.beam_width]

    def _ranked(self, candidates: Iterable[TokenLogprobs]) -> list[tuple[float, int, int]]:
        """(minus the cumulative logprob, parent, token), best first; ties go to the earlier beam, then the lower id."""
        return sorted(
            (-(beam.logprob + logprob), parent, token)
            for parent, (beam, top) in enumerate(zip(self.live, candidates, strict=True))
            for token, logprob in zip(top.top_ids, top.top_logprobs, strict=True)
            if logprob > -inf
        )

    def _finish(self, beam: Beam, reason: FinishReason) -> None:
        hypothesis = self._hypothesis(beam, reason)
        insort(self.finished, hypothesis, key=lambda one: -one.score)  # behind its equals
        del self.finished[self.params.beam_width :]

    def _is_over(self) -> bool:
        if not self.live:
            return True
        if len(self.finished) < self.params.beam_width:
            return False
        early, penalty, best = self.params.early_stopping, self.params.length_penalty, self.live[0]
        if early is True:
            return True
        # A logprob only falls as its beam grows; the score that one and the same logprob gives grows with the length if
        # the penalty is above 0.
        length = self.max_tokens if early == "never" and penalty > 0 else len(best.token_ids)
        return self._score(best.logprob, length) <= self.finished[-1].score

    def _hypothesis(self, beam: Beam, reason: FinishReason) -> Hypothesis:
        return Hypothesis(beam.token_ids, beam.logprob, self._score(beam.logprob, len(beam.token_ids)), reason)

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / max(length, 1) ** self.params.length_penalty)
