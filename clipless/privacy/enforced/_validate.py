"""`validate`: for a whole model, what can be trained privately, how, and what stands in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipless.bounds import SensitivityReport, sensitivity, unwrap_module
from clipless.errors import CliplessError, PrivacyError
from clipless.privacy.enforced._calls import layers_with_thresholds
from clipless.privacy.enforced._inputs import InputSpec, spec_of_batch
from clipless.privacy.enforced._proof import ProvedModel, batch_norms, prove_rows_apart
from clipless.privacy.enforced._report import proved_bounds

if TYPE_CHECKING:
    from rich.console import Group

_EXPLODED = 1e4


@dataclass(frozen=True)
class ParameterAnswer:
    """Whether a parameter can be trained privately: `"proof"`, `"enforcement"`, or not, and why."""

    name: str
    by: str
    """`"proof"`, `"enforcement"`, `"frozen"`, `"no use"` or `"refused"`."""
    reason: str = ""
    """What stands in the way, with the fix."""


@dataclass(frozen=True)
class ValidationReport:
    """What of a model can be trained privately, by parameter, and all that prevents it."""

    parameters: tuple[ParameterAnswer, ...]
    problems: tuple[str, ...]
    """What keeps the model from `bounds="enforced"`; nothing if it can be trained."""
    warnings: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether the model can be trained as it is, with `bounds="enforced"`."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self) | {"trainable": self.trainable}

    def __rich__(self) -> Group:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("parameter", overflow="fold")
        table.add_column("trainable by")
        table.add_column("what to do", overflow="fold")
        for each in self.parameters:
            table.add_row(Text(each.name), each.by, Text(each.reason))
        word = "can" if self.trainable else "cannot"
        lines = [Text(f"The model {word} be trained privately with bounds='enforced'.")]
        lines += [Text(f"- {problem}") for problem in (*self.problems, *self.warnings)]
        return Group(table, *lines)

    def __str__(self) -> str:
        import io

        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=110).print(self)
        return buffer.getvalue()


def validate(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor], *,
    loss_lipschitz: float = 1.0,
) -> ValidationReport:  # fmt: skip
    """Say of every parameter whether it can be trained privately: by proof, by enforcement, or not.

    All problems are listed and not only the first, each with its place and what to do. Nothing of
    the model is changed, and no value of `inputs` is looked at: they are replaced by random ones.

    Args:
        model: any module.
        inputs: a batch such as the model is called on: a tensor, a tuple of them, or a mapping for
            arguments by name. Shapes and kinds count.
        loss_lipschitz: of the loss, for bounds that explode from layer to layer.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        >>> report = validate(model, torch.zeros(1, 4))
        >>> report.trainable, report.problems[0].split(":")[0]
        (False, '1 (BatchNorm1d)')
        >>> model[1] = torch.nn.GroupNorm(2, 8)
        >>> [each.by for each in validate(model, torch.zeros(1, 4)).parameters][:2]
        ['enforcement', 'enforcement']
    """
    model = unwrap_module(model)
    spec = InputSpec.of(inputs, {}) if isinstance(inputs, tuple) else spec_of_batch(inputs, model)
    problems = list(batch_norms(model))
    problems += _of_layers(model)
    proof: ProvedModel | None = None
    if not problems:
        try:
            proof = prove_rows_apart(model, spec, exact=None)
        except (CliplessError, PrivacyError) as error:
            problems.append(str(error))
    shape = spec.shapes[0] if len(spec.shapes) == 1 else spec.shapes
    proved = proved_bounds(model, loss_lipschitz, shape)
    answers = tuple(
        _answer(name, parameter, proof, proved, problems)
        for name, parameter in model.named_parameters()
    )
    return ValidationReport(answers, tuple(problems), _exploding(model, shape, loss_lipschitz))


def _of_layers(model: nn.Module) -> list[str]:
    """What the layers themselves tell: types and devices, before anything is run."""
    found = []
    handled, alone = layers_with_thresholds(model)
    names = {id(module): path for path, module in model.named_modules()}
    for module, _ in handled:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        ):
            found.append(
                f"{names[id(module)]} ({type(module).__name__}): max_norm, scale_grad_by_freq and "
                "sparse change the table, or scale gradients by what the whole batch holds. Leave "
                "these options out."
            )
    for module in alone:
        known = [
            kind for kind in type(module).__mro__[1:] if kind.__module__.startswith("torch.nn")
        ]
        if known and known[0] is not nn.Module and not isinstance(module, nn.ParameterList):
            found.append(
                f"{names[id(module)]} ({type(module).__name__}): it is a kind of "
                f"{known[0].__name__} that has no thresholds. Use torch's own Linear, Conv, "
                "Embedding, normalisation, MultiheadAttention, LSTM, GRU or RNN, or freeze it."
            )
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if kinds - {torch.float32, torch.float64} or len(kinds) > 1:
        found.append(
            f"trainable parameters are {', '.join(sorted(map(str, kinds)))}: keep them in float32."
        )
    return found


def _answer(
    name: str, parameter: Tensor, proof: ProvedModel | None, proved: Mapping[str, float],
    problems: list[str],
) -> ParameterAnswer:  # fmt: skip
    if not parameter.requires_grad:
        return ParameterAnswer(name, "frozen")
    if proved.get(name, 0.0) > 0:
        return ParameterAnswer(name, "proof")
    if proof is None:
        path = name.rpartition(".")[0]
        own = [each for each in problems if each.startswith(f"{path} (")]
        return ParameterAnswer(name, "refused", (own or problems)[0])
    if name not in proof.planned.uses:
        return ParameterAnswer(
            name, "no use", "the forward pass does not depend on it: freeze it, or take it out"
        )
    return ParameterAnswer(name, "enforcement")


def _exploding(model: nn.Module, shape: Any, loss: float) -> tuple[str, ...]:
    """Warn of a Lipschitz network whose bounds grow until nothing can be learnt under them."""
    try:
        report = sensitivity(model, loss=loss, input_shape=shape)
    except (CliplessError, ValueError):
        return ()
    return exploding_bounds(report)


def exploding_bounds(report: SensitivityReport) -> tuple[str, ...]:
    """Return what to say of proved bounds under whose noise nothing is learnt; nothing if fine."""
    largest = max(report.gradient_bounds.values(), default=0.0)
    if not report.nodes or largest <= _EXPLODED * report.loss_lipschitz:
        return ()
    grown = max(report.nodes, key=lambda node: max(node.lipschitz, default=0.0))
    worst = max(report.gradient_bounds, key=lambda name: report.gradient_bounds[name])
    return (
        f"bounds explode: one example's gradient of {worst} is bounded by {largest:.3g} only, and "
        f"under its noise nothing is learnt. The operation with the largest factor is {grown.name} "
        f"({grown.operation}), {max(grown.lipschitz, default=0.0):.3g}: use layers of norm 1, or "
        "bounds='enforced', which caps them by thresholds.",
    )
