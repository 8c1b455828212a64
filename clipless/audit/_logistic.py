"""Logistic regression for attacks: a few features, a ridge, Newton's method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logistic:
    """A fitted attack: features (n, d) -> log odds of being a member, (n,)."""

    mean: Tensor
    scale: Tensor
    weights: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return _design(features, self.mean, self.scale) @ self.weights


def fit_logistic(features: Tensor, member: Tensor, *, ridge: float = 1.0) -> Logistic:
    """Fit on features (n, d) and booleans (n,), both kinds weighted equally.

    Minimises the logistic loss plus `ridge / 2 * ||w||^2` on standardised features; the intercept
    goes free. Newton's steps are halved until the objective falls, so that they converge.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> attack = fit_logistic(x, torch.tensor([False, False, True, True]))
        >>> (attack(x) > 0).tolist()
        [False, False, True, True]
    """
    rows, label = features.double(), member.double()
    count = len(label)
    positives = float(label.sum())
    if not 0 < positives < count:
        raise ValueError("a logistic attack needs members and non-members to learn from")
    mean, scale = rows.mean(dim=0), rows.std(dim=0)
    scale = torch.where(scale > 1e-12, scale, torch.ones_like(scale))
    design = _design(rows, mean, scale)
    share = torch.where(label > 0, count / (2 * positives), count / (2 * (count - positives)))
    penalty = torch.full((design.shape[1],), ridge, dtype=torch.float64)
    penalty[0] = 1e-9  # the intercept, only kept from running away

    def objective(weights: Tensor) -> Tensor:
        odds = design @ weights
        losses = torch.nn.functional.softplus(odds) - label * odds
        return (share * losses).sum() + 0.5 * (penalty * weights.square()).sum()

    weights = torch.zeros(design.shape[1], dtype=torch.float64)
    value = objective(weights)
    for _ in range(50):
        chance = torch.sigmoid(design @ weights)
        slope = design.T @ (share * (chance - label)) + penalty * weights
        curvature = (design.T * (share * chance * (1 - chance))) @ design + torch.diag(penalty)
        step = torch.linalg.solve(curvature, slope)
        length = 1.0
        while length > 1e-6 and not objective(weights - length * step) <= value:
            length /= 2
        weights = weights - length * step
        fall, value = float(value - objective(weights)), objective(weights)
        if fall <= 1e-10 * (1 + abs(float(value))):
            break
    return Logistic(mean, scale, weights)


def _design(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    # Outliers are cut off: one infinite loss must not decide the fit.
    rows = ((torch.nan_to_num(features.double()) - mean) / scale).clamp(-10, 10)
    return torch.cat([rows.new_ones(len(rows), 1), rows], dim=1)
