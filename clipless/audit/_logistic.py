"""Logistic regression for attacks: scikit-learn's, on standardised features without outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logistic:
    """A fitted attack: features (n, d) -> log odds of being a member, (n,)."""

    mean: Tensor
    scale: Tensor
    regression: Any

    def __call__(self, features: Tensor) -> Tensor:
        odds = self.regression.decision_function(_design(features, self.mean, self.scale).numpy())
        return torch.from_numpy(odds)


def fit_logistic(features: Tensor, member: Tensor, *, ridge: float = 1.0) -> Logistic:
    """Fit on features (n, d) and booleans (n,), both kinds weighted equally.

    Minimises the logistic loss plus `ridge / 2 * ||w||^2` on standardised features; the intercept
    goes free.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> attack = fit_logistic(x, torch.tensor([False, False, True, True]))
        >>> (attack(x) > 0).tolist()
        [False, False, True, True]
    """
    if bool(member.all()) or not bool(member.any()):
        raise ValueError("a logistic attack needs members and non-members to learn from")
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError(
            "membership inference needs scikit-learn: pip install 'clipless[sklearn]'"
        ) from error
    rows = features.detach().cpu().double()
    mean, scale = rows.mean(dim=0), rows.std(dim=0)
    scale = torch.where(scale > 1e-12, scale, torch.ones_like(scale))
    regression = LogisticRegression(
        C=1 / ridge, class_weight="balanced", solver="newton-cholesky", tol=1e-8
    )
    regression.fit(_design(rows, mean, scale).numpy(), member.cpu().numpy())
    return Logistic(mean, scale, regression)


def _design(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    # Outliers are cut off: one infinite loss must not decide the fit.
    rows = features.detach().cpu().double()
    return ((torch.nan_to_num(rows) - mean) / scale).clamp(-10, 10)
