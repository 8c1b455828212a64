"""Attacks on what this library claims: for now, on its own sensitivity bounds."""

from clipless.audit._attack import AttackResult, attack_bounds, class_labels, gaussian_targets

__all__ = ["attack_bounds", "AttackResult", "class_labels", "gaussian_targets"]
