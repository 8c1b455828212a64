"""Losses on class scores whose gradient saturates: cross-entropies and cosine similarity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.common import require_positive
from clipless.kernels import scale_into_ball
from clipless.losses._base import (
    Loss,
    Reduction,
    class_count,
    class_membership,
    output_count,
    probabilities,
    scores,
)


class CrossEntropy(Loss):
    """Cross-entropy at temperature tau: `CE(tau * output) / tau`.

    The gradient is `softmax(tau * output) - e_y`, of norm at most `sqrt(2)` for every tau and K:
    a larger `tau` makes the loss steeper around the decision boundary and costs no noise.

    Shape: output `(B, K)` with K >= 2, target `(B,)` of integer class indices. Where its value
    cannot be inspected, an index out of range gives the loss 0 and no gradient.

    >>> loss = CrossEntropy(tau=1.0)
    >>> loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(0.6931)
    >>> round(loss.lipschitz, 4)
    1.4142
    """

    def __init__(self, tau: float = 1.0, *, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.tau = require_positive("tau", tau)

    @property
    def lipschitz(self) -> float:
        """`sqrt(2)`, approached when a wrong class takes all the probability."""
        return math.sqrt(2.0)

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `sqrt(2)`; `output_shape` is `(K,)`."""
        class_count("CrossEntropy", output_shape)
        return self.lipschitz

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return `logsumexp(tau * output) / tau - output[y]` for every example."""
        output = scores("CrossEntropy", output)
        class_count("CrossEntropy", output.shape[1:])
        member = class_membership("CrossEntropy", output, target)
        # The loss does not depend on a common shift; this one keeps tau * output from overflowing.
        shifted = output - output.amax(dim=1, keepdim=True).detach()
        logarithms = F.log_softmax(self.tau * shifted, dim=1)
        return torch.where(member, logarithms, 0.0).sum(dim=1) / -self.tau

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"tau={self.tau}, {super().extra_repr()}"


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy at temperature tau, mean over the K outputs of an example.

    `mean_k BCE(tau * output_k, target_k) / tau`. The gradient has entries
    `(sigmoid(tau * output_k) - target_k) / K`, each at most `1/K`: its norm is at most
    `1/sqrt(K)`, that is 1 for one logit.

    Shape: output `(B,)` or `(B, 1)` with target `(B,)` or `(B, 1)`, or several labels per
    example with output and target of the same shape. Targets lie in [0, 1]: numbers, booleans
    or probabilities. Where they cannot be inspected they are clamped to [0, 1].

    >>> loss = BinaryCrossEntropy(tau=20.0)
    >>> loss(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 1]))
    tensor(0.0173)
    >>> loss.lipschitz, loss.lipschitz_for((4,))
    (1.0, 0.5)
    """

    def __init__(self, tau: float = 1.0, *, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.tau = require_positive("tau", tau)

    @property
    def lipschitz(self) -> float:
        """1, the constant for one logit; more outputs have a smaller one."""
        return 1.0

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `1/sqrt(K)` for an output of K numbers."""
        return 1.0 / math.sqrt(output_count("BinaryCrossEntropy", output_shape))

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over an example's outputs."""
        output = scores("BinaryCrossEntropy", output)
        output_count("BinaryCrossEntropy", output.shape[1:])
        positives = probabilities("BinaryCrossEntropy", output, target)
        # Each term keeps its precision in its own tail. Beyond the threshold softplus is linear
        # to the last bit of float64, and below it the exponential fits float32.
        losses = (1.0 - positives) * F.softplus(output, beta=self.tau, threshold=50.0)
        losses = losses + positives * F.softplus(-output, beta=self.tau, threshold=50.0)
        return losses if output.ndim == 1 else losses.flatten(1).mean(dim=1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"tau={self.tau}, {super().extra_repr()}"


class CosineSimilarity(Loss):
    """Negative cosine between the output and its class, `-output[y] / max(||output||, floor)`.

    This is `-x[y] / floor` for the projection x of the output onto the ball of radius `floor`.
    The projection is 1-Lipschitz, hence the bound `1/floor`; it is reached inside the ball.

    Shape: output `(B, K)` with K >= 2, target `(B,)` of integer class indices. Where its value
    cannot be inspected, an index out of range gives the loss 0 and no gradient.

    >>> loss = CosineSimilarity(floor=0.5)
    >>> loss(torch.tensor([[3.0, 4.0]]), torch.tensor([1]))
    tensor(-0.8000)
    >>> loss.lipschitz
    2.0
    """

    def __init__(self, floor: float, *, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.floor = require_positive("floor", floor)

    @property
    def lipschitz(self) -> float:
        """`1/floor`, reached by every output shorter than the floor."""
        return 1.0 / self.floor

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `1/floor`; `output_shape` is `(K,)`."""
        class_count("CosineSimilarity", output_shape)
        return self.lipschitz

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the negative cosine of every example."""
        output = scores("CosineSimilarity", output)
        class_count("CosineSimilarity", output.shape[1:])
        member = class_membership("CosineSimilarity", output, target)
        cosines = scale_into_ball(output, self.floor) / self.floor
        return -torch.where(member, cosines, 0.0).sum(dim=1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"floor={self.floor}, {super().extra_repr()}"
