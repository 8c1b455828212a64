"""The guarantee: sampling, noise, accounting, the ledger, and the engine that couples them."""

from clipless.privacy._accounting import default_delta, delta, delta_curve, epsilon, epsilon_curve
from clipless.privacy._budget import Budget
from clipless.privacy._calibration import noise_multiplier_for, steps_for
from clipless.privacy._engine import PrivacyEngine
from clipless.privacy._ledger import Ledger
from clipless.privacy._loader import PrivateLoader
from clipless.privacy._mechanism import (
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
)
from clipless.privacy._plan import Plan
from clipless.privacy._report import PrivacyReport

__all__ = [
    "PrivacyEngine",
    "Plan",
    "PrivacyReport",
    "PrivateLoader",
    "Ledger",
    "Budget",
    "Mechanism",
    "PoissonSampling",
    "FixedSizeSampling",
    "FullBatch",
    "Relation",
    "epsilon",
    "delta",
    "epsilon_curve",
    "delta_curve",
    "default_delta",
    "noise_multiplier_for",
    "steps_for",
]
