"""Continuing a run that was saved: the same plan, and the same noise from there on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipless.errors import PrivacyError
from clipless.privacy._plan import Plan
from clipless.privacy._session import TrainingSession


def require_same_plan(begun: Plan, plan: Plan) -> None:
    """Refuse to resume a run under another plan, naming the differences."""
    found = begun.differences(plan)
    if found:
        lines = [f"  {name}: {before} then, {now} now" for name, (before, now) in found.items()]
        raise PrivacyError(
            "the run to resume has another plan:\n" + "\n".join(lines) + "\nResume it with what "
            "it began with, or begin a new run."
        )


def load_noise(session: TrainingSession, state: Mapping[str, Any]) -> None:
    """Continue the noise of a saved run, on the devices that it was drawn on."""
    devices = {str(parameter.device) for parameter in session._trainable}
    if devices != set(state["noise"]):
        raise PrivacyError(
            f"the noise was drawn on {', '.join(sorted(state['noise']))} and would now be drawn "
            f"on {', '.join(sorted(devices))}, where it cannot be repeated: resume on the same "
            "device, or with replay=False."
        )
    session.noise.load_state_dict(state["noise"])
    session.noise.seeded = bool(state["seeded_noise"])
