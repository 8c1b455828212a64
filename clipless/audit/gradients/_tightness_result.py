"""Quotients of gradient norms and bounds: histograms, quantiles, a table."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Eight bins a decade, from a ten-thousandth of the bound to the bound itself.
EDGES = (0.0, *(10 ** (-4 + step / 8) for step in range(33)))
_BLOCKS = " ▁▂▃▄▅▆▇█"
NOTE = (
    "gradient norms of private examples, measured without noise: not covered by the guarantee, "
    "keep them as you keep the data"
)


@dataclass(frozen=True, kw_only=True)
class ParameterTightness:
    """How one parameter's gradient norms, divided by their bound, are distributed."""

    name: str
    bound: float
    """The proved bound of one example's gradient norm."""
    mean: float
    quantiles: tuple[float, ...]
    """At 5, 25, 50, 75 and 95%."""
    largest: float
    counts: tuple[int, ...]
    """How many quotients lie between consecutive edges; the last bin has no upper end."""


@dataclass(frozen=True, kw_only=True)
class Tightness:
    """Gradient norm over bound, for every parameter and for all of them together.

    `result["name"]` is that of one parameter. `private` is False: none of this is covered by the
    guarantee of the training.
    """

    parameters: tuple[ParameterTightness, ...]
    whole: ParameterTightness
    """The whole gradient of an example, over the bound of its norm."""
    edges: tuple[float, ...]
    examples: int
    loss: str
    slack: float
    """What rounding may add, relative to the bound; the sensitivities include it."""
    private: bool = False

    def __getitem__(self, name: str) -> ParameterTightness:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    @property
    def violations(self) -> dict[str, float]:
        """Parameters whose bound was exceeded, with the largest quotient: none, if all is well."""
        every = (*self.parameters, self.whole)
        return {p.name: p.largest for p in every if not p.largest <= 1 + self.slack}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON; what is not finite becomes null."""
        return _plain({**asdict(self), "violations": self.violations, "note": NOTE})

    def table(self) -> Table:
        """Return the distributions as a `rich` table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title="Gradient norm over bound",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("parameter", overflow="fold")
        for heading in ("bound", "mean", "median", "95%", "largest"):
            table.add_column(heading, justify="right")
        table.add_column("1e-4 ... 1", no_wrap=True)
        for each in (*self.parameters, self.whole):
            shown = (each.mean, each.quantiles[2], each.quantiles[4], each.largest)
            over = "" if each.largest <= 1 + self.slack else " exceeded"
            name = Text.assemble(each.name, (over, "bold red"))
            cells = [f"{value:.3g}" for value in shown]
            table.add_row(name, f"{each.bound:.4g}", *cells, _bars(each.counts))
        return table

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        note = f"{self.examples} examples, {self.loss}. {NOTE[0].upper()}{NOTE[1:]}."
        return Group(self.table(), Text(note))

    def __str__(self) -> str:
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=110).print(self)
        return buffer.getvalue()


def summarise(
    norms: Tensor, *, bounds: Mapping[str, float], whole: float, loss: str, slack: float
) -> Tightness:
    """Turn norms (examples, parameters), in the order of `bounds`, into distributions."""
    parameters = tuple(
        _summary(name, column, bound)
        for (name, bound), column in zip(bounds.items(), norms.unbind(dim=1), strict=True)
    )
    return Tightness(
        parameters=parameters,
        whole=_summary("whole gradient", torch.linalg.vector_norm(norms, dim=1), whole),
        edges=EDGES,
        examples=len(norms),
        loss=loss,
        slack=slack,
    )


def _summary(name: str, norms: Tensor, bound: float) -> ParameterTightness:
    ratios = norms / bound if bound > 0 else torch.where(norms > 0, math.inf, norms)
    # A gradient that is no number cannot be below a bound: it counts as infinitely above.
    ratios = torch.nan_to_num(ratios, nan=math.inf, posinf=math.inf)
    inner = torch.tensor(EDGES[1:-1], dtype=ratios.dtype)
    counts = torch.bincount(torch.bucketize(ratios, inner), minlength=len(EDGES) - 1)
    points = torch.tensor(QUANTILES, dtype=ratios.dtype)
    return ParameterTightness(
        name=name,
        bound=bound,
        mean=float(ratios.mean()),
        quantiles=tuple(ratios.quantile(points, interpolation="nearest").tolist()),
        largest=float(ratios.max()),
        counts=tuple(counts.tolist()),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bars(counts: tuple[int, ...]) -> str:
    """A histogram in one line of text, three bins a character."""
    heights = [sum(counts[start : start + 3]) for start in range(0, len(counts), 3)]
    tallest = max(heights)
    return "".join(_BLOCKS[-(-height * (len(_BLOCKS) - 1) // tallest)] for height in heights)
