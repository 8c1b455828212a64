"""The plan of a private run: everything its guarantee rests on, in one frozen object.

Sampling, sensitivity, noise and the event that the accountant reads are derived from the same
fields, so that they cannot disagree.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from clipless.accounting import Accountant, Mechanism, Relation, Sampling, epsilon
from clipless.accounting.correlated import Strategy, strategy_from_dict
from clipless.bounds import SensitivityReport
from clipless.common import MALFORMED_ERRORS, Query, error_text
from clipless.errors import DamagedFileError, PrivacyError
from clipless.kernels import joint_multiplier
from clipless.privacy._precision import NO_ROUNDING, PRECISIONS, Precision, SumRounding
from clipless.privacy._precision import arithmetic_slack as arithmetic_slack
from clipless.privacy._schedule import Schedule
from clipless.privacy.noise._scales import STRATEGIES, NoiseStrategy, noise_scales


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """One parameter: its size, and the bound of one example's gradient (before dividing by b)."""

    name: str
    size: int
    gradient_bound: float

    def __post_init__(self) -> None:
        """Refuse what is no parameter."""
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a parameter is {self.name!r}, no text")
        _require(f"size of {self.name}", self.size, whole=True, least=0)
        _require(f"gradient_bound of {self.name}", self.gradient_bound, least=0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step releases, how it is sampled, and how many steps are meant to be taken.

    One step releases, for every parameter d, the sum of the sampled examples' gradients divided by
    the public constant `expected_batch_size`, plus Gaussian noise of standard deviation
    `noise_deviations[d]`. One example contributes at most `sensitivities[d]` to it.
    """

    sampling: Sampling
    relation: Relation
    noise_multiplier: float
    noise: NoiseStrategy
    noise_coefficients: tuple[float, ...] | None
    parameters: tuple[ParameterPlan, ...]
    views: int = 1
    """How many augmented views of every example a step averages over."""
    user_records: int | None = None
    """Of how many of a user's records a step takes the average at most, where users are sampled.

    The unit of privacy is then a user, and all that counts examples counts users.
    """
    queries: tuple[ParameterPlan, ...] = ()
    """Counts that a step releases beside its gradients, for thresholds that follow a quantile."""
    loss: str
    loss_lipschitz: float
    precision: Precision = "float32"
    """What products of activations and weights are rounded to; sums are more exact, see `sums`."""
    arithmetic_slack: float
    """What rounding may add to a gradient bound, relative to it: part of the sensitivities."""
    sums: SumRounding = NO_ROUNDING
    """What rounding in the sum over the batch adds: its slack is part of `arithmetic_slack`."""
    accountant: Accountant
    delta: float
    target_epsilon: float | None
    steps: int | None
    strategy: Strategy | None = None
    """How noise is correlated over the steps; None where it is independent. Deviations are then
    those of z, of which the noise of a step is a row of `C^-1 z`."""
    strategy_error: float | None = None
    """The error to be expected, over that of independent noise for the same epsilon and order."""

    def __post_init__(self) -> None:
        """Refuse a plan that means nothing."""
        _ = self.schedule.mechanism  # checks the noise multiplier, the sampling, the strategy
        _require("delta", self.delta, least=0)
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta!r}")
        _require("views", self.views, whole=True, least=1)
        if self.user_records is not None:
            _require("user_records", self.user_records, whole=True, least=1)
        _require("loss_lipschitz", self.loss_lipschitz, least=0)
        _require("arithmetic_slack", self.arithmetic_slack, least=0)
        _require("sums.slack", self.sums.slack, least=0)
        _require("sums.uncovered", self.sums.uncovered, least=0)
        if self.target_epsilon is not None:
            _require("target_epsilon", self.target_epsilon, least=0)
        if self.steps is not None:
            _require("steps", self.steps, whole=True, least=0)
        if self.strategy_error is not None:
            _require("strategy_error", self.strategy_error, least=0)
        for coefficient in self.noise_coefficients or ():
            _require("noise_coefficients", coefficient, least=0)
        for name, known in (("noise", STRATEGIES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}")
        for name in ("loss", "accountant"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"the name of the {name} is {getattr(self, name)!r}, no text")

    @cached_property
    def mechanism(self) -> Mechanism:
        """The release of one step, all parameters together: what the accountant reads.

        In a fixed order it is that of one pass, for an example that counts once in it.
        """
        return self.schedule.mechanism

    @cached_property
    def schedule(self) -> Schedule:
        """What is paid at which step."""
        return Schedule(
            sampling=self.sampling, relation=self.relation, strategy=self.strategy,
            noise_multiplier=self.noise_multiplier,
        )  # fmt: skip

    @cached_property
    def each_step(self) -> Mechanism | None:
        """What every step costs, if each is paid for by itself."""
        alone = self.strategy is None and self.schedule.period == 1
        return self.mechanism if alone else None

    @property
    def unit(self) -> Literal["example", "user"]:
        """Who is sampled and protected: what neighbours differ by one of."""
        return "example" if self.user_records is None else "user"

    @cached_property
    def expected_batch_size(self) -> float:
        """The public constant b that gradients are divided by."""
        return self.sampling.expected_batch_size

    @cached_property
    def loss_divisor(self) -> float:
        """What the loss of every row is divided by: b K, for K views of every example.

        The K rows of one example together then weigh 1/b, as one row without augmentation does.
        """
        return self.expected_batch_size * self.views

    @property
    def sensitivities(self) -> dict[str, float]:
        """What one example can contribute to each parameter's release, rounding included."""
        factor = (1 + self.arithmetic_slack) / self.expected_batch_size
        return {p.name: factor * p.gradient_bound for p in self._released}

    @property
    def noise_deviations(self) -> dict[str, float]:
        """Standard deviation of the noise on each parameter's release."""
        sensitivities = list(self.sensitivities.values())
        scales = noise_scales(
            self.noise,
            sensitivities=sensitivities,
            sizes=[p.size for p in self._released],
            coefficients=self._all_coefficients(),
        )
        deviations = [self.noise_multiplier * scale for scale in scales]
        joint = joint_multiplier(sensitivities, deviations)
        # The accountant is told `noise_multiplier`: no strategy may deliver less.
        if not joint >= self.noise_multiplier * (1 - 1e-12):
            raise PrivacyError(
                f"the noise strategy {self.noise!r} delivers a sigma of {joint:.6g}, less than "
                f"the {self.noise_multiplier:.6g} that is accounted for. Use another strategy."
            )
        return {p.name: d for p, d in zip(self._released, deviations, strict=True)}

    def noise_gain(self, step: int | None = None) -> float:
        """Return the deviation of a step's noise over `noise_deviations`; by default, of all steps.

        It is 1 for independent noise. Noise that takes back earlier noise is larger in each step.
        """
        if self.strategy is None:
            return 1.0
        gains = self.strategy.gains
        if step is None or step >= len(gains):
            return float((gains @ gains / len(gains)) ** 0.5)
        return float(gains[step])

    @cached_property
    def releases(self) -> tuple[Query, ...]:
        """What one step releases, in the order of its parameters and then its counts."""
        deviations = self.noise_deviations
        return tuple(Query(name, d, deviations[name]) for name, d in self.sensitivities.items())

    @property
    def _released(self) -> tuple[ParameterPlan, ...]:
        return self.parameters + self.queries

    def _all_coefficients(self) -> tuple[float, ...] | None:
        """Counts get a large share of the noise: a tenth of a gradient's accuracy is plenty."""
        given = self.noise_coefficients
        return None if given is None else given + (10.0 * max(given),) * len(self.queries)

    def epsilon(self, *, steps: int | None = None, delta: float | None = None) -> float:
        """Return what `steps` steps of this plan cost, by default all that are planned."""
        count = self.steps if steps is None else steps
        if count is None:
            return math.inf
        chosen = self.delta if delta is None else delta
        return epsilon(self.schedule.cost(0, count), chosen, accountant=self.accountant)

    def with_bounds(self, report: SensitivityReport) -> Plan:
        """Return the plan with the gradient bounds of a new sensitivity report."""
        return replace(
            self,
            parameters=planned_parameters(report),
            loss=report.loss,
            loss_lipschitz=report.loss_lipschitz,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds without loss."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        mechanism = self.mechanism.to_dict()
        data |= {"sampling": mechanism["sampling"], "relation": mechanism["relation"]}
        data["parameters"] = [asdict(p) for p in self.parameters]
        data["queries"] = [asdict(p) for p in self.queries]
        data["sums"] = asdict(self.sums)
        if self.strategy is None:
            del data["strategy"], data["strategy_error"]
        else:
            data["strategy"] = self.strategy.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Restore what `to_dict` wrote; unknown or missing fields are refused.

        Plans from before there were views have one, from before there were users, examples; from
        before precisions, float32; from before exact sums, sums of which nothing is known.
        """
        expected = {field.name for field in fields(cls)}
        examples = {"views": 1, "user_records": None}
        real = {"precision": "float32", "sums": {}}
        independent = {"strategy": None, "strategy_error": None}
        data = {**examples, **real, **independent, **data}
        if set(data) != expected:
            raise ValueError(f"a plan has the fields {sorted(expected)}, got {sorted(data)}")
        mechanism = Mechanism.from_dict(
            {key: data[key] for key in ("noise_multiplier", "sampling", "relation")}
        )
        coefficients, strategy = data["noise_coefficients"], data["strategy"]
        return cls(
            **{
                **data,
                "sampling": mechanism.sampling,
                "relation": mechanism.relation,
                "noise_coefficients": None if coefficients is None else tuple(coefficients),
                "parameters": tuple(ParameterPlan(**p) for p in data["parameters"]),
                "queries": tuple(ParameterPlan(**p) for p in data["queries"]),
                "sums": SumRounding(**data["sums"]),
                "strategy": None if strategy is None else strategy_from_dict(strategy),
            }
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote; `DamagedFileError` says what is wrong with it."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except MALFORMED_ERRORS as error:
            raise DamagedFileError(
                f"{path} is no plan, or was damaged: {error_text(error)}. Restore it from a backup."
            ) from error

    def differences(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which two plans differ, with both values."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        }

    def __str__(self) -> str:
        from clipless.privacy._report import plan_table, render

        return render(plan_table(self))


def _require(name: str, value: Any, *, least: int, whole: bool = False) -> None:
    """Refuse what is not a finite number (a whole one) of at least `least`."""
    kind: Any = int if whole else int | float
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not (right and least <= value <= sys.float_info.max):
        words = "a whole number" if whole else "a finite number"
        raise ValueError(f"{name} must be {words} of at least {least}, got {value!r:.40}")


def planned_parameters(report: SensitivityReport) -> tuple[ParameterPlan, ...]:
    """The trainable parameters of a report, with their bounds."""
    return tuple(
        ParameterPlan(name=p.name, size=math.prod(p.shape), gradient_bound=p.gradient_bound)
        for p in report.parameters
        if p.trainable
    )
