"""Mechanisms as frozen data, and what they cost: PLD, RDP, filters, calibration. Without torch."""

from clipless.accounting._calibration import noise_multiplier_for, steps_for
from clipless.accounting._epsilon import chosen_delta, default_delta, delta, epsilon, epsilon_curve
from clipless.accounting._filter import RenyiFilter, meter_of, stated
from clipless.accounting._history import (
    Accountant,
    AccountantName,
    History,
    merge,
    prepare,
    require_support,
)
from clipless.accounting._mechanism import (
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    Sampling,
    require_current,
)

__all__ = [
    "Mechanism",
    "Sampling",
    "PoissonSampling",
    "FixedSizeSampling",
    "FullBatch",
    "Relation",
    "require_current",
    "Accountant",
    "AccountantName",
    "History",
    "merge",
    "prepare",
    "require_support",
    "epsilon",
    "delta",
    "epsilon_curve",
    "default_delta",
    "chosen_delta",
    "RenyiFilter",
    "meter_of",
    "stated",
    "noise_multiplier_for",
    "steps_for",
]
