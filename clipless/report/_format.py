"""Formatting of numbers for people. Upper bounds are never rounded down."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal

NONE = "\N{EN DASH}"
"""What stands for a number that is not there."""


def number(value: float | int | None, digits: int = 4) -> str:
    """Return a number with a few significant digits; a dash if there is none.

    Example:
        >>> number(1e-05), number(0.123456), number(60000), number(1234567)
        ('1e-5', '0.1235', '60,000', '1,234,567')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if isinstance(value, float) and math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    mantissa, mark, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def upper(value: float | None, digits: int = 4) -> str:
    """Return a number rounded up to a few significant digits, as an upper bound has to be.

    Example:
        >>> upper(2.00001), upper(1.99996), upper(1.5)
        ('2.001', '2', '1.5')
    """
    if value is None or not math.isfinite(value) or value == 0:
        return number(value, digits)
    exact = Decimal(value)
    place = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return number(float(exact.quantize(place, rounding=ROUND_CEILING)), digits)


def percent(value: float | None, digits: int = 1) -> str:
    """Return a fraction in per cent.

    Example:
        >>> percent(0.9534)
        '95.3%'
    """
    return NONE if value is None else f"{100 * value:.{digits}f}%"


def percent_upper(value: float | None, digits: int = 1) -> str:
    """Return a fraction in per cent, rounded up.

    Example:
        >>> percent_upper(0.95341)
        '95.4%'
    """
    if value is None:
        return NONE
    place = Decimal(1).scaleb(-digits)
    return f"{(100 * Decimal(value)).quantize(place, rounding=ROUND_CEILING)}%"
