"""Audits: attacks on the bounds, on epsilon, and on trained models."""

from clipless.audit._canaries import (
    draw_coins,
    hardest_labels,
    insert_canaries,
    orthogonal_canaries,
)
from clipless.audit._curve_audit import curve_audit, curve_p_value, curve_test
from clipless.audit._noise_audit import NoiseResult, ReleasedNoise
from clipless.audit._noise_family import NoiseFamily
from clipless.audit._one_run import (
    default_guesses,
    one_run_audit,
    one_run_lower_bound,
    one_run_p_value,
)
from clipless.audit._release_scores import ReleaseScores
from clipless.audit._repeated import audit_repeated_training, distinguishing_audit
from clipless.audit._result import AuditResult, CurveResult, OneRunResult, RepeatedResult
from clipless.audit._statistics import Estimate, clopper_pearson
from clipless.audit._training import (
    WatchedRun,
    audit_training,
    audit_training_curve,
    train_watched,
)
from clipless.audit.gradients._attack import (
    AttackResult,
    attack_bounds,
    class_labels,
    gaussian_targets,
)
from clipless.audit.gradients._tightness import tightness
from clipless.audit.gradients._tightness_callback import TightnessCallback
from clipless.audit.gradients._tightness_result import ParameterTightness, Tightness
from clipless.audit.membership._inference import membership_inference
from clipless.audit.membership._result import AttackOutcome, LowRate, MembershipResult
from clipless.audit.replaying._empty import (
    DataWithEmptyRecord,
    with_empty_record,
    with_empty_user,
)
from clipless.audit.replaying._replay import Recording, record, replay
from clipless.audit.replaying._result import ReplayedQuery, ReplayResult

__all__ = [
    "attack_bounds",
    "AttackResult",
    "class_labels",
    "gaussian_targets",
    "tightness",
    "Tightness",
    "ParameterTightness",
    "TightnessCallback",
    "audit_training",
    "audit_training_curve",
    "train_watched",
    "WatchedRun",
    "curve_audit",
    "curve_p_value",
    "curve_test",
    "CurveResult",
    "NoiseFamily",
    "ReleasedNoise",
    "NoiseResult",
    "hardest_labels",
    "audit_repeated_training",
    "AuditResult",
    "OneRunResult",
    "RepeatedResult",
    "one_run_audit",
    "one_run_lower_bound",
    "one_run_p_value",
    "default_guesses",
    "distinguishing_audit",
    "orthogonal_canaries",
    "draw_coins",
    "insert_canaries",
    "ReleaseScores",
    "replay",
    "record",
    "Recording",
    "with_empty_record",
    "with_empty_user",
    "DataWithEmptyRecord",
    "ReplayedQuery",
    "ReplayResult",
    "membership_inference",
    "MembershipResult",
    "AttackOutcome",
    "LowRate",
    "Estimate",
    "clopper_pearson",
]
