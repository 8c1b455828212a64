"""`EnforcedReport`: for every parameter, the bound of a gradient, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from clipless.bounds import ParameterBound, SensitivityReport, Shape, sensitivity
from clipless.errors import CliplessError
from clipless.losses import Loss
from clipless.nn import BoundedInput
from clipless.privacy.enforced._options import EnforcedBounds
from clipless.privacy.enforced._proof import ProvedModel
from clipless.privacy.enforced._thresholds import BoundedParameter

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class EnforcedReport(SensitivityReport):
    """The bounds of a model whose layers hold gradients to thresholds, and whose rows are apart.

    `gradient_bounds` are the thresholds where they act, and the proved bounds where these are
    tighter: `bounded_by` says which.
    """

    proof: ProvedModel = field(kw_only=True)
    settings: EnforcedBounds = field(kw_only=True)
    proved_bounds: Mapping[str, float] = field(kw_only=True)
    """What the architecture proves, of Lipschitz networks: no entry where it proves nothing."""

    @property
    def bounded_by(self) -> dict[str, str]:
        """For every trainable parameter, `"proof"`, `"enforcement"` or `"no use"`."""
        found = {}
        for each in self.parameters:
            if each.trainable:
                proved = self.proved_bounds.get(each.name, math.inf) <= each.gradient_bound
                word = "proof" if proved else "enforcement"
                found[each.name] = word if each.uses else "no use"
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return what is known of each parameter, ready for JSON."""
        return {
            "bounds": "enforced",
            "operators": self.proof.operators,
            "loss": self.loss,
            "loss_lipschitz": self.loss_lipschitz,
            "parameters": [
                {
                    "name": each.name, "shape": list(each.shape), "trainable": each.trainable,
                    "uses": each.uses, "gradient_bound": each.gradient_bound,
                    "bounded_by": self.bounded_by.get(each.name, "frozen"),
                }
                for each in self.parameters
            ],
        }  # fmt: skip

    def __rich__(self) -> Group:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Bounds of one example's gradient", title_justify="left",
                      box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fmt: skip
        table.add_column("parameter", overflow="fold")
        for heading in ("shape", "uses", "gradient", "bounded by"):
            table.add_column(heading, justify="right")
        by = self.bounded_by
        for each in self.parameters:
            if each.trainable:
                table.add_row(
                    Text(each.name), "x".join(map(str, each.shape)) or "1", str(each.uses),
                    f"{each.gradient_bound:.4g}", by[each.name],
                )  # fmt: skip
        summary = Text(
            f"Examples stay apart: the batch axis was followed through {self.proof.operators} "
            "operators of a forward pass. Enforced bounds are where thresholds begin."
        )
        return Group(table, summary)


def bounded_parameters(
    model: nn.Module, proof: ProvedModel, proved: Mapping[str, float]
) -> tuple[BoundedParameter, ...]:
    """The trainable parameters of a model, with their uses and what is proved of them."""
    return tuple(
        BoundedParameter(
            name, parameter.numel(), len(proof.planned.uses.get(name, ())),
            proved.get(name) or math.inf,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )  # fmt: skip


def proved_bounds(model: nn.Module, loss: Loss | float, shape: Shape) -> dict[str, float]:
    """Return what the architecture proves, if it is that of a Lipschitz network; else nothing."""
    if not any(isinstance(each, BoundedInput) for each in model.modules()):
        return {}
    try:
        return sensitivity(model, loss=loss, input_shape=shape).gradient_bounds
    except (CliplessError, ValueError):
        return {}


def enforced_report(
    model: nn.Module,
    proof: ProvedModel,
    *,
    settings: EnforcedBounds,
    loss: Loss | float,
) -> EnforcedReport:
    """Return the report of a model with the thresholds that a run begins with."""
    constant = loss.lipschitz_for(proof.output_shape) if isinstance(loss, Loss) else float(loss)
    shapes = proof.spec.shapes
    proved = proved_bounds(model, loss, shapes[0] if len(shapes) == 1 else shapes)
    parameters = bounded_parameters(model, proof, proved)
    first = settings.first_thresholds([each.name for each in parameters if each.uses])
    values = {each.name: min(first[each.name], each.proved) for each in parameters if each.uses}
    return EnforcedReport(
        nodes=(),
        parameters=tuple(
            ParameterBound(
                name=name, shape=tuple(parameter.shape), gradient_bound=values.get(name, 0.0),
                uses=len(proof.planned.uses.get(name, ())), trainable=parameter.requires_grad,
                certificate=None,
            )
            for name, parameter in model.named_parameters()
        ),
        loss=type(loss).__name__ if isinstance(loss, Loss) else "given constant",
        loss_lipschitz=constant,
        lipschitz=math.inf,
        output_bound=math.inf,
        input_shapes=proof.spec.shapes,
        proof=proof,
        settings=settings,
        proved_bounds=proved,
    )  # fmt: skip
