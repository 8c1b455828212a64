"""Robustness certificates of Lipschitz networks, and attacks on them."""

from clipless.robustness._accuracy import CertifiedAccuracy, certified_accuracy
from clipless.robustness._attack import (
    RADIUS_FACTORS,
    AttackOptions,
    CertificateAttack,
    attack_certificates,
)
from clipless.robustness._certificate import certified_radius
from clipless.robustness._pgd import PGDResult, pgd_attack
from clipless.robustness._stages import Normalize, colour_transform

__all__ = [
    "certified_radius",
    "certified_accuracy",
    "CertifiedAccuracy",
    "pgd_attack",
    "PGDResult",
    "attack_certificates",
    "AttackOptions",
    "CertificateAttack",
    "Normalize",
    "colour_transform",
    "RADIUS_FACTORS",
]
