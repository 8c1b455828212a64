"""Certified radii: how far an example may be moved before its decision can change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clipless.robustness._certifier import EVALUATION_BATCH, Certifier, Method, example_shape


def certified_radius(
    model: nn.Module,
    x: Tensor,
    *,
    y: Tensor | None = None,
    input_lipschitz: float = 1.0,
    method: Method = "rows",
    threshold: float = 0.0,
    arithmetic: torch.dtype = torch.float64,
    batch_size: int = EVALUATION_BATCH,
) -> Tensor:
    """Return for each example a radius within which the model's decision cannot change.

    Guarantee: for every change of the input of Euclidean norm below the radius, the model in
    evaluation mode decides as it does for `x`. Weights are certified first; Lipschitz constants are
    proved, never estimated. Logits are evaluated in double precision, and what rounding can do to
    them is taken off, so that the guarantee holds of the model computed in `arithmetic`.

    - One logit, `(batch,)` or `(batch, 1)`: `|f - threshold| / l`.
    - K logits, `"margin"`: `(top1 - top2) / (sqrt(2) l)`; `"rows"`: with the rows of a linear last
      layer, `min_j (f_i - f_j) / (l_features ||w_i - w_j||)`, which is never smaller.
    - An input guard is accounted for exactly, `mode="sphere"` included: radii are in the units of
      what enters the model.

    Args:
        model: any model that `clipless.sensitivity` accepts; a bounded input is not needed.
        x: (batch, ...) inputs. Examples with entries that are not finite get 0.
        y: labels. With them, examples that are not classified right get 0.
        input_lipschitz: Lipschitz constant of preprocessing that happened before `x`: radii are
            then in the units of the raw data. (Or make the preprocessing the model's first layer.)
        arithmetic: the precision in which the decision is made. By default double precision: the
            guarantee is about the network as a function, of which a run in float32 is an
            approximation. With `torch.float32` the worst case of its rounding is taken off as
            well, which is pessimistic for layers with thousands of inputs. (TF32, autocast and
            convolutions by transforms are coarser than float32, and not covered.)

    Returns:
        (batch,) float64, 0 where nothing is certified, on the device of `x`.

    Raises:
        ConstraintError: a weight lies outside its constraint set.
        UnsupportedOperationError: the model has no Lipschitz constant.

    Example:
        >>> model = torch.nn.Sequential(clipless.nn.SpectralLinear(2, 2))
        >>> _ = model[0].weight.data.copy_(torch.eye(2))
        >>> clipless.project(model)
        >>> radius = certified_radius(model, torch.tensor([[3.0, 1.0]]))  # of a boundary x1 = x2
        >>> round(radius.item(), 4)
        1.4142
    """
    certifier = Certifier(
        model,
        input_shape=example_shape(x),
        input_lipschitz=input_lipschitz,
        method=method,
        threshold=threshold,
        arithmetic=arithmetic,
    )
    found = certifier.certify(x, batch_size=batch_size)
    if y is None:
        return found.radii
    right = certifier.is_right(found.predictions, y)
    return torch.where(right, found.radii, torch.zeros_like(found.radii))
