"""Saving a run, and continuing it: the same plan, and the same noise from there on."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from clipless.errors import PrivacyError
from clipless.privacy._distributed_sharded import noise_prefix
from clipless.privacy._mechanism import Mechanism
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


def run_state(
    session: TrainingSession,
    *,
    run: str,
    first_plan: Plan,
    first_thresholds: Mapping[str, float],
) -> dict[str, Any]:
    """Return what continues a run after its last step: see `PrivacyEngine.state_dict`."""
    for parameter in session._trainable:
        session.noise._generator(parameter.device)  # there before the first noise is drawn
    noise: dict[str, Any] = dict(session.noise.state_dict())
    if session.team is not None:
        states = session.team.processes.gather(noise)
        noise = {
            noise_prefix(rank, sharded=session.team.sharded) + name: each
            for rank, own in enumerate(states)
            for name, each in own.items()
        }
    return {
        "run": run,
        "plan": first_plan.to_dict(),
        "thresholds": dict(first_thresholds),
        "noise_multiplier": session.plan.noise_multiplier,
        "steps_taken": session.steps_taken,
        "sampler": session.loader.state_dict(),
        "noise": noise,
        "seeded_noise": session.noise.seeded,
        "spent": [(each.to_dict(), count) for each, count in session.ledger.spent_in_run()],
    }


def begin_run(session: TrainingSession, state: Mapping[str, Any] | None, *, replay: bool) -> str:
    """Name the run in the ledger; take over the state of the one that it continues."""
    run, spent = secrets.token_hex(8), None
    if session.team is not None:
        run = session.team.processes.from_first(lambda: run)
    if state is not None:
        session.steps_taken = int(state["steps_taken"])
        session.set_noise_multiplier(state["noise_multiplier"])
    if state is not None and replay:
        _load_noise(session, state)
        run = str(state["run"])
        spent = [(Mechanism.from_dict(each), int(count)) for each, count in state["spent"]]
    session.ledger.begin_run(run, spent=spent)
    return run


def _load_noise(session: TrainingSession, state: Mapping[str, Any]) -> None:
    """Continue the noise of a saved run, on the devices that it was drawn on."""
    devices = {str(parameter.device) for parameter in session._trainable}
    saved, team = dict(state["noise"]), session.team
    if team is not None:
        everywhere = team.processes.gather(sorted(devices))
        prefix = partial(noise_prefix, sharded=team.sharded)
        devices = {prefix(rank) + name for rank, own in enumerate(everywhere) for name in own}
    if devices != set(saved):
        raise PrivacyError(
            f"the noise was drawn on {', '.join(sorted(state['noise']))} and would now be drawn "
            f"on {', '.join(sorted(devices))}, where it cannot be repeated: resume on the same "
            "devices and number of processes, or with replay=False."
        )
    if team is not None:
        own = prefix(team.processes.rank)
        saved = {k.removeprefix(own): each for k, each in saved.items() if k.startswith(own)}
    session.noise.load_state_dict(saved)
    session.noise.seeded = bool(state["seeded_noise"])
