"""The plan of a run, with bound, noise and certificate of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipless.privacy import (
    ParameterPlan,
    Plan,
    describe_accountant,
    describe_arithmetic,
    describe_sampling,
    describe_unit,
    neighbours_in_words,
)
from clipless.report._format import number
from clipless.report.sections._checks import Check
from clipless.spectral import Certificate


@dataclass(frozen=True, kw_only=True)
class WeightCertificate:
    """A proved norm of a weight, and the one that its constraint allows."""

    bound: float
    radius: float
    method: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One parameter, or a count that every step releases beside the gradients."""

    name: str
    size: int
    gradient_bound: float
    """Of one example's gradient, before the division by the batch size."""
    sensitivity: float
    """What one example can change in a release: bound and slack over the batch size."""
    noise_deviation: float
    share: float
    """Its part of what a step reveals, `(sensitivity / noise)^2` over the sum."""
    certificate: WeightCertificate | None
    final_bound: float | None
    """The bound at the end, where thresholds were moved during training."""


@dataclass(frozen=True, kw_only=True)
class Foundations:
    """The plan of a run and its layers, from which the guarantee follows."""

    facts: tuple[tuple[str, str], ...]
    layers: tuple[Layer, ...]
    arithmetic_slack: float
    network_lipschitz: float | None
    certified_at_step: int | None


def foundations(plan: Plan, written: Mapping[str, Any] | None) -> Foundations:
    """Join the plan with what `bounds.json` says, if it is there."""
    latest = None if written is None else written.get("end", written["start"])
    bounds = {} if latest is None else {each["name"]: each for each in latest["parameters"]}
    sensitivities, deviations = plan.sensitivities, plan.noise_deviations
    revealed = {
        name: (sensitivities[name] / deviation) ** 2 if deviation else 0.0
        for name, deviation in deviations.items()
    }
    total = sum(revealed.values()) or 1.0
    at = None if written is None else written.get("last_step", written.get("first_step"))
    return Foundations(
        facts=_facts(plan),
        layers=tuple(
            Layer(
                name=each.name,
                size=each.size,
                gradient_bound=each.gradient_bound,
                sensitivity=sensitivities[each.name],
                noise_deviation=deviations[each.name],
                share=revealed[each.name] / total,
                certificate=_certificate(bounds.get(each.name)),
                final_bound=_moved(each, bounds.get(each.name)),
            )
            for each in plan.parameters + plan.queries
        ),
        arithmetic_slack=plan.arithmetic_slack,
        network_lipschitz=None if latest is None else latest["lipschitz"],
        certified_at_step=at,
    )


def _facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    target = "none" if plan.target_epsilon is None else f"epsilon {number(plan.target_epsilon)}"
    facts = [
        ("Neighbouring data sets differ by", neighbours_in_words(plan)),
        ("Privacy unit", describe_unit(plan)),
        ("Sampling", describe_sampling(plan.sampling, plan.unit)),
        ("Gradients are divided by the public constant", number(plan.expected_batch_size)),
        ("Noise multiplier of a step", number(plan.noise_multiplier, 5)),
        ("Noise is shared out by", plan.noise),
        ("Loss", f"{plan.loss}, {number(plan.loss_lipschitz)}-Lipschitz"),
        ("Budget", f"{target} at delta {number(plan.delta)}"),
        ("Planned steps", "open" if plan.steps is None else number(plan.steps)),
        ("Accountant", describe_accountant(plan.accountant)),
        ("Products are rounded to", plan.precision),
        ("Epsilon holds for the arithmetic of", describe_arithmetic(plan)),
        ("Slack for rounding", f"{number(plan.arithmetic_slack)}, part of the sensitivities"),
    ]
    if plan.views > 1:
        facts.append(("Augmentation", f"{plan.views} views of every example, averaged"))
    return tuple(facts)


def _certificate(parameter: Mapping[str, Any] | None) -> WeightCertificate | None:
    found = None if parameter is None else parameter["certificate"]
    if found is None:
        return None
    certificate = Certificate(
        bound=float(found["bound"]), radius=float(found["radius"]), method=str(found["method"])
    )
    return WeightCertificate(
        bound=certificate.bound,
        radius=certificate.radius,
        method=certificate.method,
        holds=certificate.holds,
    )


def _moved(planned: ParameterPlan, parameter: Mapping[str, Any] | None) -> float | None:
    """The bound that was found last, if it is not the planned one."""
    if parameter is None:
        return None
    bound = float(parameter["gradient_bound"])
    same = abs(bound - planned.gradient_bound) <= 1e-9 * planned.gradient_bound
    return None if same else bound


def certificates_hold(found: Foundations) -> Check | None:
    """Return the check that all weights are certified; None without certificates."""
    proved = [layer for layer in found.layers if layer.certificate is not None]
    if not proved:
        return None
    outside = [layer.name for layer in proved if layer.certificate and not layer.certificate.holds]
    detail = f"{len(proved)} weights were certified after step {found.certified_at_step}."
    if outside:
        detail += f" Outside their constraint: {', '.join(outside)}. The bounds do not hold."
    return Check(
        name="Every constrained weight is where its bound needs it",
        state="failed" if outside else "passed",
        detail=detail,
    )
