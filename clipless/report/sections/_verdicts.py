"""Checks of a run's claim against measurements and attacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipless.report._format import number, percent
from clipless.report.sections._checks import Check


def bounds_hold(tight: Mapping[str, Any] | None) -> Check | None:
    """Return the check that no measured gradient exceeds its bound; None without measurements."""
    if tight is None:
        return None
    detail = f"True in {tight['measurements']} measurements."
    if tight["violations"]:
        detail = f"Exceeded by {', '.join(tight['violations'])}. The guarantee does not hold."
    return Check(
        name="No gradient that was looked at exceeds its bound",
        state="failed" if tight["violations"] else "passed",
        detail=detail,
        private=True,
    )


def not_contradicted(audit: Mapping[str, Any] | None) -> Check | None:
    """Return the check that no audit contradicts epsilon; a failure is named and voids nothing."""
    if audit is None:
        return None
    against = [
        f"an attack proves epsilon >= {number(each['lower_bound'])} where "
        f"{number(each['claimed_epsilon'])} is claimed, at confidence "
        f"{percent(each.get('confidence'))}"
        for each in audit["epsilon"]
        if each["exposed"]
    ]
    against += [
        f"a gradient of {name} is {number(ratio)} times its bound"
        for each in audit["bounds"]
        for name, ratio in each["ratios"].items()
        if ratio is None or ratio > 1 + each["tolerance"]
    ]
    against += [each for each in audit["against"] if not against]
    detail = "; ".join(against) + ". Do not rely on the claim."
    return Check(
        name="No audit contradicts the claim",
        state="failed" if against else "passed",
        detail=detail[0].upper() + detail[1:] if against else "No attack got further than allowed.",
        voids=False,
        private=True,
    )
