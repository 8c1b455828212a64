"""The sensitivity report: what was proved, as data and as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from clipless.bounds._rule import Product
from clipless.spectral import Certificate

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True)
class NodeBound:
    """The bounds of one operation, for every example.

    `input_bounds` (X) and `output_bound` bound activations, `lipschitz` (l) the Jacobian with
    respect to each input, `cotangent_bound` (G) the cotangent arriving at the output for the loss
    of one example, `jacobians` (J) the Jacobian with respect to each parameter, by full name, and
    `gradient_bounds` what this use of the parameter adds to its gradient. `roundings` is what lower
    precision does: see `Bound`.
    """

    name: str
    operation: str
    output_shape: tuple[int, ...]
    input_bounds: tuple[float, ...]
    lipschitz: tuple[float, ...]
    output_bound: float
    cotangent_bound: float
    jacobians: Mapping[str, float]
    gradient_bounds: Mapping[str, float] = field(default_factory=dict)
    roundings: float | Product | None = None


@dataclass(frozen=True)
class ParameterBound:
    """The proved bound of one parameter's gradient, for every example."""

    name: str
    shape: tuple[int, ...]
    gradient_bound: float
    uses: int
    """How many times a forward pass uses the parameter; each use adds to the bound."""
    trainable: bool
    certificate: Certificate | None


@dataclass(frozen=True)
class SensitivityReport:
    """What backpropagation for bounds proves of a model and a loss.

    For every input that passes the input guard, every target, and all weights inside their
    constraint sets, the gradient of ONE example's loss with respect to the parameter `name` has
    Euclidean norm at most `gradient_bounds[name]`, before any division by a batch size. The
    bounds are those of exact arithmetic.
    """

    nodes: tuple[NodeBound, ...]
    parameters: tuple[ParameterBound, ...]
    loss: str
    loss_lipschitz: float
    lipschitz: float
    """Lipschitz constant of the network with respect to its input; infinite if it has none."""
    output_bound: float
    """Bound of the norm of the network's output."""
    input_shapes: tuple[tuple[int, ...], ...]

    @property
    def gradient_bounds(self) -> dict[str, float]:
        """Bound of one example's gradient norm for each trainable parameter, by name."""
        return {p.name: p.gradient_bound for p in self.parameters if p.trainable}

    @property
    def global_bound(self) -> float:
        """Bound of the norm of one example's whole gradient: the root of the sum of squares."""
        return float(sum(bound**2 for bound in self.gradient_bounds.values()) ** 0.5)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        data = asdict(self)
        data["gradient_bounds"] = self.gradient_bounds
        data["global_bound"] = self.global_bound
        return data

    def plot_bounds(self) -> Figure:
        """Return a figure of the bounds of all trainable parameters, in the network's order."""
        from clipless.plots import bounds_figure

        return bounds_figure(self.gradient_bounds, title=f"Loss: {self.loss}")

    def table(self) -> Table:
        """Return the bounds of every operation and parameter as a `rich` table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title="Sensitivity of one example's gradient",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("operation", overflow="fold")
        table.add_column("output", justify="right")
        for heading in ("X", "l", "G"):
            table.add_column(heading, justify="right")
        table.add_column("parameter", overflow="fold")
        table.add_column("J", justify="right")
        table.add_column("gradient", justify="right")
        bounds = {p.name: p for p in self.parameters}
        for node in self.nodes:
            # Names are the user's: as `Text`, square brackets in them stay brackets.
            cells: list[str | Text] = [
                Text.assemble(node.name, " ", (node.operation, "dim")),
                "x".join(map(str, node.output_shape)) or "1",
                _numbers(node.input_bounds),
                _numbers(node.lipschitz),
                _number(node.cotangent_bound),
            ]
            for name, jacobian in node.jacobians.items() or [("", None)]:
                parameter = bounds.get(name)
                bound = "" if parameter is None else _gradient(parameter)
                table.add_row(
                    *cells, Text(name), "" if jacobian is None else _number(jacobian), bound
                )
                cells = [""] * len(cells)
        return table

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        summary = Text.assemble(
            f"Loss: {self.loss}, {_number(self.loss_lipschitz)}-Lipschitz. "
            "Whole gradient of one example: at most ",
            (_number(self.global_bound), "bold"),
            f". Network: {_number(self.lipschitz)}-Lipschitz, output at most "
            f"{_number(self.output_bound)}.\n"
            "X: norm of the input, l: its Jacobian, G: norm of the arriving cotangent, J: the "
            "parameter's Jacobian, gradient: its norm. Each is an upper bound for every example.",
        )
        return Group(self.table(), summary)

    def __str__(self) -> str:
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=120).print(self)
        return buffer.getvalue()


def _gradient(parameter: ParameterBound) -> str:
    if not parameter.trainable:
        return "frozen"
    shared = f" ({parameter.uses} uses)" if parameter.uses > 1 else ""
    return _number(parameter.gradient_bound) + shared


def _number(value: float) -> str:
    return f"{value:.4g}"


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(map(_number, values))
