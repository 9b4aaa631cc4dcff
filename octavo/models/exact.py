"""Powers and logarithms that are the same float64 on every machine: libm's and numpy's differ by CPU."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal

_ARITHMETIC = Context(prec=40, rounding=ROUND_HALF_EVEN)  # float64 has 17 digits


def power(base: float, exponent: float) -> float:
    """base ** exponent, for a base > 0."""
    return float(_ARITHMETIC.power(Decimal(base), Decimal(exponent)))


def log(x: float) -> float:
    """The natural logarithm of x > 0."""
    return float(_ARITHMETIC.ln(Decimal(x)))
