"""The guarantee: sampling, noise, accounting, the ledger, and the engine that couples them."""

from clipless.accounting import (
    CyclicPoissonSampling,
    FixedOrder,
    FixedSizeSampling,
    FullBatch,
    LargeDelta,
    Mechanism,
    PoissonSampling,
    Relation,
    RenyiFilter,
    Sampling,
    chosen_delta,
    default_delta,
    delta,
    epsilon,
    epsilon_curve,
    noise_multiplier_for,
    steps_for,
)
from clipless.kernels import GaussianNoise
from clipless.ledger import Budget, Ledger
from clipless.privacy._bounds_options import ProvedBounds
from clipless.privacy._defaults import SamplingName, example_shape, named_sampling, relation_for
from clipless.privacy._engine import PrivacyEngine
from clipless.privacy._options import PrivacyOptions, merge_arguments
from clipless.privacy._plan import ParameterPlan, Plan, arithmetic_slack, planned_parameters
from clipless.privacy._quantile_thresholds import quantile_thresholds, set_quantile_thresholds
from clipless.privacy._report import (
    RELATIONS,
    PrivacyReport,
    describe_accountant,
    describe_arithmetic,
    describe_sampling,
    describe_unit,
    guarantee_in_words,
    neighbours_in_words,
)
from clipless.privacy.enforced._options import BoundsChoice, EnforcedBounds
from clipless.privacy.enforced._validate import ParameterAnswer, ValidationReport, validate
from clipless.privacy.noise._correlated_options import Correlated, planned_for
from clipless.privacy.noise._scales import key_names, noise_names
from clipless.privacy.sampling._batch_options import BatchOptions
from clipless.privacy.sampling._buckets import Buckets
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.sampling._padding import Padding, padded_sampling
from clipless.privacy.sampling._samplers import (
    IndexSampler,
    steps_of_one_pass,
    validate_sampling,
)
from clipless.privacy.sampling._streams import epochs_of
from clipless.privacy.sampling._users import Users
from clipless.privacy.sampling._wrapping import check_wrappable
from clipless.privacy.step._hooks import SessionHook
from clipless.privacy.step._output_guard import guard_room
from clipless.privacy.step._session import TrainingSession

__all__ = [
    "PrivacyEngine",
    "IndexSampler",
    "PrivacyOptions",
    "BoundsChoice",
    "ProvedBounds",
    "EnforcedBounds",
    "validate",
    "ValidationReport",
    "ParameterAnswer",
    "BatchOptions",
    "Buckets",
    "Users",
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
    "FixedOrder",
    "CyclicPoissonSampling",
    "Relation",
    "epsilon",
    "delta",
    "epsilon_curve",
    "default_delta",
    "chosen_delta",
    "LargeDelta",
    "noise_multiplier_for",
    "steps_for",
    "GaussianNoise",
    "ParameterPlan",
    "Sampling",
    "SamplingName",
    "SessionHook",
    "TrainingSession",
    "arithmetic_slack",
    "check_wrappable",
    "describe_sampling",
    "example_shape",
    "guard_room",
    "named_sampling",
    "padded_sampling",
    "Padding",
    "planned_parameters",
    "guarantee_in_words",
    "relation_for",
    "set_quantile_thresholds",
    "steps_of_one_pass",
    "quantile_thresholds",
    "validate_sampling",
    "merge_arguments",
    "RELATIONS",
    "describe_accountant",
    "describe_arithmetic",
    "describe_unit",
    "neighbours_in_words",
    "noise_names",
    "key_names",
    "Correlated",
    "planned_for",
    "epochs_of",
]
