"""Saving a run, and continuing it: the same plan, and the noise of the steps that are repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipless.accounting import Mechanism
from clipless.common import MALFORMED_ERRORS, error_text
from clipless.errors import PrivacyError
from clipless.privacy._plan import Plan
from clipless.privacy.noise._scales import key_names, noise_names
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.sampling._samplers import IndexSampler
from clipless.privacy.step._session import TrainingSession


def plan_to_resume(state: Mapping[str, Any] | None) -> Plan | None:
    """Return the plan that a saved run began with, or refuse what is not the state of a run."""
    if state is None:
        return None
    try:
        plan, sampler = Plan.from_dict(state["plan"]), dict(state["sampler"])
        IndexSampler(sampling=plan.sampling).load_state_dict(sampler)
        for mechanism, count in state["spent"]:
            Mechanism.from_dict(mechanism), int(count)
        numbers = (sampler["step"], state["steps_taken"], state["noise_multiplier"])
        if min(map(float, numbers)) < 0 or not (state["run"] and state["noise"]):
            raise ValueError("a number is negative, or the name or the noise is empty")
    except MALFORMED_ERRORS as error:
        raise PrivacyError(
            f"resume_from is not the state of a run: {error_text(error)}. Give what "
            "engine.state_dict() returned, whole."
        ) from error
    return plan


def require_same_plan(begun: Plan, plan: Plan) -> None:
    """Refuse to resume a run under another plan, naming the differences."""
    found = begun.differences(plan)
    if found:
        lines = [f"  {name}: {before} then, {now} now" for name, (before, now) in found.items()]
        raise PrivacyError(
            "the run to resume has another plan:\n" + "\n".join(lines) + "\nResume it with what "
            "it began with, or begin a new run."
        )


def unit_of(loader: PrivateLoader) -> str | None:
    """Return what stands for whose each record is; None where examples are the units."""
    return None if loader.unit is None else loader.unit.digest


def require_same_users(state: Mapping[str, Any] | None, begun: Plan, loader: PrivateLoader) -> None:
    """Refuse to resume a run under another grouping of records, of which the plan knows no more
    than how many users there are.
    """
    then, now = (state or {}).get("users"), unit_of(loader)
    if then == now or (begun.user_records is None and now is None):
        return
    raise PrivacyError(
        "the run to resume was about other units: records were "
        f"{then or ('of users that it does not name' if begun.user_records else 'single units')} "
        f"then, and are {now or 'single units'} now. Its steps would be counted for units that "
        "they were not taken for. Resume it with the users it began with, or begin a new run."
    )


def run_state(
    session: TrainingSession,
    *,
    first_plan: Plan,
    first_thresholds: Mapping[str, float],
) -> dict[str, Any]:
    """Return what continues a run after its last step: see `PrivacyEngine.state_dict`."""
    noise: dict[str, Any] = dict(session.noise.state_dict())
    noise = {
        session.group.noise_prefix(rank) + name: each
        for rank, own in enumerate(session.group.processes.gather(noise))
        for name, each in own.items()
    }
    return {
        "run": session.outcomes.run,
        "plan": first_plan.to_dict(),
        "users": unit_of(session.loader),
        "thresholds": dict(first_thresholds),
        "noise_multiplier": session.plan.noise_multiplier,
        "steps_taken": session.steps_taken,
        "first": session._book.first,
        "sampler": session.loader.state_dict(),
        "noise": noise,
        "insecure_noise": session.noise.insecure,
        "enforced": None if session.thresholds is None else session.thresholds.state_dict(),
        "spent": [
            (each.to_dict(), count)
            for each, count in session.ledger.spent_in_run(session.outcomes.run)
        ],
    }


def begin_run(session: TrainingSession, state: Mapping[str, Any] | None, *, replay: bool) -> None:
    """Let the session begin, or take over the state of a run and continue it.

    Whatever can fail does so before anything is changed.
    """
    if state is not None:
        session.steps_taken = int(state["steps_taken"])
        session.set_noise_multiplier(state["noise_multiplier"])
        session.noise.insecure |= _was_insecure(state)
        if session.thresholds is not None:
            session.thresholds.load_state_dict(state.get("enforced") or {})
            session.hold_to_thresholds()
        if replay:
            _load_noise(session, state)
    sampling = session.outcomes.begin(state, repeat=replay)
    session.attach(**sampling)


def _load_noise(session: TrainingSession, state: Mapping[str, Any]) -> None:
    """Continue the noise of a saved run, in as many processes as it was drawn in."""
    saved, group = dict(state["noise"]), session.group
    expected = noise_names(
        [group.noise_prefix(rank) for rank in range(group.processes.size)]
    )  # fmt: skip
    keys = key_names(saved)
    if expected != keys:
        raise PrivacyError(
            f"the noise of the saved run is that of {len(keys)} process(es), or of an earlier "
            f"version ({', '.join(sorted(saved))}), and would now be drawn as "
            f"{', '.join(sorted(expected))}: it cannot be repeated. Resume with the same number of "
            "processes, or with replay=False, which goes on with fresh noise."
        )
    own = group.noise_prefix(group.processes.rank)
    session.noise.load_state_dict(
        {name.removeprefix(own): each for name, each in saved.items() if name.startswith(own)}
    )


def _was_insecure(state: Mapping[str, Any]) -> bool:
    """Whether somebody chose a seed of the run so far; `seeded` is what it was called before."""
    said = (state.get("insecure_noise"), state.get("seeded_noise"))
    sampler = state["sampler"]
    return any((*said, sampler.get("insecure"), sampler.get("seeded")))
