"""A model that changed in the middle of a run: is it still the one that the plan is about?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from clipless.bounds import SensitivityReport
from clipless.errors import PrivacyError
from clipless.nn import clipping_modules
from clipless.privacy._plan import Plan, planned_parameters
from clipless.privacy._quantile_thresholds import planned_queries


def check_same_model(
    model: nn.Module,
    report: SensitivityReport,
    plan: Plan,
    parameters: Mapping[str, Tensor],
    trainable: Sequence[Tensor],
) -> None:
    """Refuse changes that new bounds alone do not make good: other parameters, scales, queries."""
    now = dict(model.named_parameters())
    if [(n, id(p)) for n, p in now.items()] != [(n, id(p)) for n, p in parameters.items()]:
        raise PrivacyError(
            "parameters of the model were replaced by other tensors (a new layer, or "
            "load_state_dict(assign=True)). Call make_private again with an optimizer for the "
            "new ones; the ledger goes on from what is spent."
        )
    scale = 1 / plan.loss_divisor
    for path, module in clipping_modules(model):
        if module.loss_scale != scale:
            raise PrivacyError(
                f"{path}.loss_scale was changed to {module.loss_scale:g}. In private training "
                f"it is what the loss of every row is weighted by, {scale:g}; change `norm` or "
                "`weight_clip` instead."
            )
    planned = [(p.name, p.size) for p in plan.parameters]
    if [(p.name, p.size) for p in planned_parameters(report)] != planned:
        raise PrivacyError(
            "the trainable parameters of the model are no longer those of the plan: layers "
            "were added, removed, frozen or unfrozen. Call make_private again; the ledger "
            "goes on from what is spent."
        )
    if planned_queries(model, report) != plan.queries:
        raise PrivacyError(
            "layers whose threshold follows a quantile were added or removed. Call "
            "make_private again; the ledger goes on from what is spent."
        )
    check_dtypes(trainable)


def check_dtypes(trainable: Sequence[Tensor]) -> None:
    """Refuse parameters of a precision that the plan's slack does not cover."""
    dtypes = {p.dtype for p in trainable}
    if dtypes - {torch.float32, torch.float64} or len(dtypes) > 1:
        raise PrivacyError(
            f"parameters were converted to {', '.join(map(str, dtypes))}. The slack in "
            "the sensitivities covers float32: convert them back, and call make_private."
        )
