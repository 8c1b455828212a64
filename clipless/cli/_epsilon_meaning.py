"""The meaning of an epsilon: in words, and as limits of attacks."""

from __future__ import annotations

import math
from typing import Any


def best_detection(epsilon: float, delta: float, *, false_alarms: float) -> float:
    """Return the most members that any attack can find, if so many others raise a false alarm.

    (epsilon, delta)-differential privacy limits the true positive rate to
    `min(e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR))` for every attack, however much
    it knows (Kairouz, Oh and Viswanath 2015).

    Example:
        >>> round(best_detection(1.0, 1e-5, false_alarms=0.01), 4)
        0.0272
    """
    first = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    second = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return max(0.0, min(1.0, first, second))


def best_advantage(epsilon: float, delta: float) -> float:
    """Return the largest difference of true and false positive rate of any attack.

    `(e^epsilon - 1 + 2 delta) / (e^epsilon + 1)`.

    Example:
        >>> round(best_advantage(1.0, 1e-5), 3)
        0.462
    """
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1))


def membership_limit(epsilon: float, delta: float, *, replaced: bool) -> float:
    """Return the largest advantage in telling members from others of the same kind.

    To exchange a member for another example is to replace one. A guarantee under zero-out covers
    that as two changes, by way of the empty record: `2 epsilon`, `(1 + e^epsilon) delta`.

    Example:
        >>> round(membership_limit(1.0, 1e-5, replaced=False), 3)
        0.762
    """
    if replaced:
        return best_advantage(epsilon, delta)
    return best_advantage(2 * epsilon, min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta))


def meaning(epsilon: float, delta: float, *, replaced: bool = False) -> str:
    """Return what (epsilon, delta) promises one person, in plain words."""
    if not math.isfinite(epsilon):
        return "No limit: nothing is promised to anybody."
    change = "replaced by another one" if replaced else "left out"
    factor = math.exp(min(epsilon, 700.0))
    found = best_detection(epsilon, delta, false_alarms=0.01)
    rating = _rating(epsilon)
    return (
        f"Whatever anybody concludes from the model, they would have concluded nearly as well had "
        f"one person's example been {change}: no outcome becomes more than {factor:.3g} times as "
        f"likely (e^epsilon), except with probability {delta:g}. Somebody who knows all other "
        "examples and accuses 1% of outsiders wrongly can recognise at most "
        f"{found:.1%} of the members. {rating}"
    )


def _rating(epsilon: float) -> str:
    if epsilon <= 1:
        return "This is usually called strong protection."
    if epsilon <= 10:
        return "This is usually called reasonable protection, stronger towards 1 than towards 10."
    return "Above 10 the promise to one person is weak on paper, whatever attacks achieve so far."


def summary(epsilon: float, delta: float) -> dict[str, Any]:
    """Return the same for machines."""
    return {
        "likelihood_factor": math.exp(epsilon) if epsilon < 700 else None,
        "best_attack_advantage": best_advantage(epsilon, delta) if math.isfinite(epsilon) else 1.0,
        "best_detection_at_1_percent_false_alarms": (
            best_detection(epsilon, delta, false_alarms=0.01) if math.isfinite(epsilon) else 1.0
        ),
    }
