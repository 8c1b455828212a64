"""The loss of language models: token-level cross-entropy, one value for a whole sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.errors import LabelError
from clipless.losses._base import Loss, Reduction
from clipless.losses._validation import readable, scores


class TokenCrossEntropy(Loss):
    """Cross-entropy of the tokens of a sequence: the mean over the record's own labelled tokens.

    A record is a whole sequence, and its loss one value. Positions whose label is `ignore_index`
    (padding, prompts) count for nothing; a record without labels costs 0. With `shift`, position t
    is compared with the label of t + 1, as causal language models are trained.

    The gradient at one of n labelled positions is `(softmax - e_y) / n`, of norm at most
    `sqrt(2) / n`; all together have at most `sqrt(2 / n) <= sqrt(2)`.

    Shape: output `(B, T, K)`, target `(B, T)` of integer tokens.

    >>> loss = TokenCrossEntropy(shift=False)
    >>> loss(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))
    tensor(0.6931)
    """

    def __init__(
        self, *, shift: bool = True, ignore_index: int = -100, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(reduction=reduction)
        self.shift, self.ignore_index = shift, ignore_index

    @property
    def lipschitz(self) -> float:
        """`sqrt(2)`, approached by a record with one labelled token."""
        return math.sqrt(2.0)

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `sqrt(2)`; `output_shape` is `(T, K)`."""
        if len(output_shape) != 2 or output_shape[1] < 2:
            raise ValueError(
                f"TokenCrossEntropy needs outputs of shape (batch, T, K), got one of "
                f"{tuple(output_shape)} for each example."
            )
        return self.lipschitz

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over each record's own labelled tokens."""
        output = scores("TokenCrossEntropy", output)
        self.lipschitz_for(output.shape[1:])
        if target.shape != output.shape[:2] or target.is_floating_point():
            raise LabelError(
                f"TokenCrossEntropy needs integer tokens of shape {tuple(output.shape[:2])}, got "
                f"{target.dtype} of shape {tuple(target.shape)}."
            )
        if self.shift:
            output, target = output[:, :-1], target[:, 1:]
        classes = output.shape[-1]
        labelled = target != self.ignore_index
        known = labelled & (target >= 0) & (target < classes)
        if readable(target) and bool((labelled & ~known).any()):
            raise LabelError(
                f"TokenCrossEntropy got labels outside of 0 to {classes - 1}. Mark positions that "
                f"count for nothing with ignore_index={self.ignore_index}."
            )
        logarithms = F.log_softmax(output, dim=-1)
        chosen = logarithms.gather(2, torch.where(known, target, 0).unsqueeze(2)).squeeze(2)
        total = torch.where(known, chosen, 0.0).sum(dim=1)
        return -total / known.sum(dim=1).clamp(min=1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"shift={self.shift}, ignore_index={self.ignore_index}, {super().extra_repr()}"
