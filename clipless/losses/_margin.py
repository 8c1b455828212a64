"""Margin losses: hinge, Kantorovich-Rubinstein, and their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from clipless.common import require_positive
from clipless.losses._base import (
    Loss,
    Reduction,
    binary_signs,
    class_membership,
    one_of,
    optional_count,
    output_count,
    scores,
)

ClassReduction = Literal["mean", "sum"]


class _MarginLoss(Loss):
    """A loss of logits `z` (K of them) and signs `t`: +1 for the example's class, -1 elsewhere."""

    def __init__(self, *, classes: int | None, reduction: Reduction) -> None:
        super().__init__(reduction=reduction)
        self.classes = optional_count("classes", classes)

    def _logit_count(self, output_shape: Sequence[int]) -> int:
        """Return K for one example's output shape `(K,)` or `()`."""
        name = type(self).__name__
        count = output_count(name, output_shape)
        if len(output_shape) > 1:
            raise ValueError(
                f"{name} needs outputs of shape (batch, K), (batch, 1) or (batch,), got "
                f"(batch, {', '.join(map(str, output_shape))})."
            )
        if self.classes not in (None, count):
            raise ValueError(f"{name} was built for classes={self.classes} logits and got {count}.")
        return count

    def _logits_and_signs(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as `(B, K)`; a label that is no class, where unchecked, has signs 0."""
        name = type(self).__name__
        output = scores(name, output)
        count = self._logit_count(output.shape[1:])
        if count == 1:
            return output.reshape(-1, 1), binary_signs(name, output, target)
        member = class_membership(name, output, target)
        known = member.any(dim=1, keepdim=True)
        return output, 2.0 * member.to(output.dtype) - known.to(output.dtype)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"classes={self.classes}, {super().extra_repr()}"


def _hinge(logits: Tensor, signs: Tensor, margin: float, class_reduction: ClassReduction) -> Tensor:
    """Mean or sum over k of `max(0, margin/2 - t_k z_k)`."""
    slack = F.relu(0.5 * margin - signs * logits)
    return slack.mean(dim=1) if class_reduction == "mean" else slack.sum(dim=1)


def _contrast_entries(count: int) -> tuple[float, float]:
    """Return `(a, b)`: the unit contrast `w_y` is `a` at the class and `-b` at the K - 1 others.

    `e_y - mean of the other basis vectors` has squared norm `1 + 1/(K-1) = K/(K-1)`, so
    `a = sqrt((K-1)/K)` and `b = a/(K-1)`. One logit: the contrast is the sign itself.
    """
    if count == 1:
        return 1.0, 1.0
    own = math.sqrt((count - 1) / count)
    return own, own / (count - 1)


def _kantorovich_rubinstein(logits: Tensor, signs: Tensor) -> Tensor:
    """`-<w_y, z>`."""
    own, other = _contrast_entries(logits.shape[1])
    weights = signs * (other + (own - other) * (signs > 0).to(signs.dtype))
    return -(weights * logits).sum(dim=1)


class MulticlassHinge(_MarginLoss):
    """Hinge loss with every class against the rest, `mean_k max(0, margin/2 - t_k * output_k)`.

    `t_k` is +1 for the example's class and -1 for the others. The gradient has entries
    `-t_k / K` or 0, so its norm is at most `1/sqrt(K)`; with `class_reduction="sum"`, `sqrt(K)`.

    Shape: output `(B, K)` and target `(B,)` of class indices; or one logit, output and target
    `(B,)` or `(B, 1)`, with labels -1 and +1. `classes` is the number K of logits (1 for the
    one-logit case): with it `lipschitz` is exact, and other outputs are refused.

    >>> import torch
    >>> loss = MulticlassHinge(margin=1.0, classes=4)
    >>> loss(torch.zeros(1, 4), torch.tensor([2]))
    tensor(0.5000)
    >>> loss.lipschitz
    0.5
    """

    def __init__(
        self,
        margin: float = 1.0,
        *,
        classes: int | None = None,
        class_reduction: ClassReduction = "mean",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(classes=classes, reduction=reduction)
        self.margin = require_positive("margin", margin)
        self.class_reduction = one_of("class_reduction", class_reduction, ("mean", "sum"))

    @property
    def lipschitz(self) -> float:
        """The constant for `classes` logits; without it 1, or infinity for a sum over classes."""
        if self.classes is not None:
            return self.lipschitz_for((self.classes,))
        return 1.0 if self.class_reduction == "mean" else math.inf

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `1/sqrt(K)`, or `sqrt(K)` for a sum over classes."""
        root = math.sqrt(self._logit_count(output_shape))
        return 1.0 / root if self.class_reduction == "mean" else root

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the hinge loss of every example."""
        logits, signs = self._logits_and_signs(output, target)
        return _hinge(logits, signs, self.margin, self.class_reduction)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        settings = f"margin={self.margin}, class_reduction={self.class_reduction!r}"
        return f"{settings}, {super().extra_repr()}"


class KantorovichRubinstein(_MarginLoss):
    """Kantorovich-Rubinstein loss as a fixed contrast of each example, `-<w_y, output>`.

    One logit, label t: `-t * output`. K logits: `w_y` is `e_y` minus the mean of the other basis
    vectors, divided by its norm, so the loss is `-sqrt((K-1)/K) * (output[y] - mean of the
    others)`. The gradient is `-w_y`: its norm is 1 for every K and every output. The weights do
    not depend on how often a class occurs in the batch, which would tie the examples together.

    Shape: output `(B, K)` and target `(B,)` of class indices; or one logit, output and target
    `(B,)` or `(B, 1)`, with labels -1 and +1. With `classes`, other numbers of logits (1 for the
    one-logit case) are refused.

    >>> import torch
    >>> loss = KantorovichRubinstein()
    >>> loss(torch.tensor([0.5, 2.0]), torch.tensor([-1, 1]))
    tensor(-0.7500)
    >>> loss.lipschitz
    1.0
    """

    def __init__(self, *, classes: int | None = None, reduction: Reduction = "mean") -> None:
        super().__init__(classes=classes, reduction=reduction)

    @property
    def lipschitz(self) -> float:
        """1, the norm of every gradient."""
        return 1.0

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return 1; `output_shape` is `(K,)` or `()`."""
        self._logit_count(output_shape)
        return 1.0

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the contrast of every example."""
        return _kantorovich_rubinstein(*self._logits_and_signs(output, target))


class HingeKR(_MarginLoss):
    """`alpha * MulticlassHinge + KantorovichRubinstein`.

    Constant: the gradient is `-(alpha c A t + w_y)` with `c = 1/K` (or 1 for a sum over classes),
    `t` the signs, `w_y` the unit contrast, and A diagonal with entries 1 where the hinge is
    active and 0 elsewhere. `t` and `w_y` have the same sign in every entry (+ at y, - at the
    others), so entry k has absolute value `alpha c A_k + |w_y,k|`, which grows with every A_k:
    the norm is largest when all classes are active, as they are at output 0. The exact constant
    is therefore `||alpha c t + w_y||`, reached, and by the triangle inequality at most
    `alpha * L_hinge + 1`. For one logit it is `alpha + 1`, the largest over all K of the mean.

    Shape: output `(B, K)` and target `(B,)` of class indices; or one logit, output and target
    `(B,)` or `(B, 1)`, with labels -1 and +1. `classes` is the number K of logits (1 for the
    one-logit case): with it `lipschitz` is exact, and other outputs are refused.

    >>> import torch
    >>> loss = HingeKR(alpha=10.0, margin=1.0)
    >>> loss(torch.tensor([0.0, 2.0]), torch.tensor([-1, 1]))
    tensor(1.5000)
    >>> loss.lipschitz, round(loss.lipschitz_for((10,)), 4)
    (11.0, 3.8464)
    """

    def __init__(
        self,
        alpha: float,
        margin: float = 1.0,
        *,
        classes: int | None = None,
        class_reduction: ClassReduction = "mean",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(classes=classes, reduction=reduction)
        self.alpha = require_positive("alpha", alpha)
        self.margin = require_positive("margin", margin)
        self.class_reduction = one_of("class_reduction", class_reduction, ("mean", "sum"))

    @property
    def lipschitz(self) -> float:
        """The constant for `classes` logits; else `alpha + 1`, infinity for a sum over classes."""
        if self.classes is not None:
            return self.lipschitz_for((self.classes,))
        return self.alpha + 1.0 if self.class_reduction == "mean" else math.inf

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `||alpha c t + w_y||`."""
        count = self._logit_count(output_shape)
        hinge = self.alpha / count if self.class_reduction == "mean" else self.alpha
        own, other = _contrast_entries(count)
        return math.hypot(hinge + own, math.sqrt(count - 1) * (hinge + other))

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the weighted sum of every example's two losses."""
        logits, signs = self._logits_and_signs(output, target)
        hinge = _hinge(logits, signs, self.margin, self.class_reduction)
        return self.alpha * hinge + _kantorovich_rubinstein(logits, signs)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        settings = f"alpha={self.alpha}, margin={self.margin}"
        return f"{settings}, class_reduction={self.class_reduction!r}, {super().extra_repr()}"
