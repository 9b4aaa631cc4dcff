"""What steps cost, as measured: by which the scheduler chooses between computing again and copying."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.98  # weight of what was known before, at each new step: some fifty steps count


@dataclass(slots=True)
class StepCost:
    """A line through the recent steps, seconds = fixed + per_token * tokens, by least squares; and seconds per move.

    What a preempted sequence has to compute again joins steps that run anyway: it costs the slope, not the average.
    """

    weight: float = 0.0
    tokens: float = 0.0  # weighted sums, as are the next three
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0
    per_move: float | None = None  # seconds that a block takes to or from the host tier; None: none was moved yet

    def add_step(self, num_tokens: int, seconds: float) -> None:
        self.weight = FORGET * self.weight + 1
        self.tokens = FORGET * self.tokens + num_tokens
        self.seconds = FORGET * self.seconds + seconds
        self.tokens_squared = FORGET * self.tokens_squared + num_tokens * num_tokens
        self.tokens_seconds = FORGET * self.tokens_seconds + num_tokens * seconds

    def add_moves(self, count: int, seconds: float) -> None:
        measured = seconds / count
        self.per_move = measured if self.per_move is None else FORGET * self.per_move + (1 - FORGET) * measured

    @property
    def per_token(self) -> float | None:
        """None: the steps so far were all of one size."""
        spread = self.weight * self.tokens_squared - self.tokens**2
        if spread <= 1e-9 * self.tokens_squared:
            return None
        return max(self.weight * self.tokens_seconds - self.tokens * self.seconds, 0.0) / spread

    def swap_pays(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether blocks are copied out and back faster than the tokens are computed again; yes as long as nothing is
        known, so that it comes to be known."""
        per_token = self.per_token
        if per_token is None or self.per_move is None:
            return True
        return 2 * num_blocks * self.per_move <= num_tokens * per_token
