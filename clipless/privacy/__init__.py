"""The guarantee: sampling, noise, accounting, the ledger, and the engine that couples them."""

from clipless.accounting import (
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    RenyiFilter,
    chosen_delta,
    default_delta,
    delta,
    epsilon,
    epsilon_curve,
    noise_multiplier_for,
    steps_for,
)
from clipless.ledger import Budget, Ledger
from clipless.privacy._engine import PrivacyEngine
from clipless.privacy._options import PrivacyOptions
from clipless.privacy._plan import Plan
from clipless.privacy._report import PrivacyReport
from clipless.privacy.sampling._batch_options import BatchOptions
from clipless.privacy.sampling._loader import PrivateLoader

__all__ = [
    "PrivacyEngine",
    "PrivacyOptions",
    "BatchOptions",
    "Plan",
    "PrivacyReport",
    "PrivateLoader",
    "Ledger",
    "Budget",
    "RenyiFilter",
    "Mechanism",
    "PoissonSampling",
    "FixedSizeSampling",
    "FullBatch",
    "Relation",
    "epsilon",
    "delta",
    "epsilon_curve",
    "default_delta",
    "chosen_delta",
    "noise_multiplier_for",
    "steps_for",
]
