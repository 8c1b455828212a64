"""Mechanisms as frozen data, and what they cost: PLD, RDP, filters, calibration. Without torch."""

from clipless.accounting._calibration import (
    noise_multiplier_for,
    noise_multiplier_for_accuracy,
    steps_for,
)
from clipless.accounting._epsilon import (
    LargeDelta,
    chosen_delta,
    default_delta,
    delta,
    epsilon,
    epsilon_curve,
)
from clipless.accounting._filter import RenyiFilter, filter_of_name, meter_accountant
from clipless.accounting._group import group_epsilon
from clipless.accounting._history import (
    Accountant,
    AccountantName,
    History,
    merge_releases,
    prepare_history,
    require_supported_sampling,
)
from clipless.accounting._mechanism import (
    SAMPLER_EPSILON,
    CyclicPoissonSampling,
    FixedOrder,
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    Sampling,
    require_supported_relation,
    steps_paid_together,
)
from clipless.accounting._trade_off import TradeOff, trade_off, trade_off_at

__all__ = [
    "SAMPLER_EPSILON",
    "Mechanism",
    "Sampling",
    "PoissonSampling",
    "FixedSizeSampling",
    "FullBatch",
    "FixedOrder",
    "CyclicPoissonSampling",
    "steps_paid_together",
    "Relation",
    "require_supported_relation",
    "Accountant",
    "AccountantName",
    "History",
    "merge_releases",
    "prepare_history",
    "require_supported_sampling",
    "epsilon",
    "delta",
    "epsilon_curve",
    "default_delta",
    "chosen_delta",
    "LargeDelta",
    "RenyiFilter",
    "meter_accountant",
    "filter_of_name",
    "noise_multiplier_for",
    "noise_multiplier_for_accuracy",
    "TradeOff",
    "trade_off",
    "group_epsilon",
    "trade_off_at",
    "steps_for",
]
