"""Certified accuracy: how many examples are right, and proved to stay right, at given radii."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipless.robustness._certifier import EVALUATION_BATCH, Certifier, Method, example_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table

RADII_OF_255 = tuple(k / 255 for k in (0, 1, 2, 4, 8, 16))
"""The radii of the usual tables, for pixels from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class CertifiedAccuracy:
    """Which fraction of the examples is classified right whatever happens within a radius.

    An example counts at radius r if its decision is right and its certified radius is at least r;
    at r = 0 this is the ordinary accuracy. Radii are Euclidean, in units of the raw input.
    """

    radii: tuple[float, ...]
    accuracies: tuple[float, ...]
    clean_accuracy: float
    curve_radii: tuple[float, ...]
    """A dense grid up to where nothing is certified any more, for plots."""
    curve_accuracies: tuple[float, ...]
    median_radius: float
    """Half of the examples that are right have at least this radius."""
    examples: int
    lipschitz: float
    """Lipschitz constant of the logits behind the input guard."""
    input_lipschitz: float
    method: str
    arithmetic: str

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON; infinite radii become null."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data = {name: list(v) if isinstance(v, tuple) else v for name, v in data.items()}
        if not math.isfinite(self.median_radius):
            data["median_radius"] = None
        return data

    def plot(self) -> Figure:
        """Return a figure of certified accuracy over the radius."""
        from clipless.plots import certificate_figure

        title = f"{self.examples:,} examples, {self.clean_accuracy:.1%} right"
        return certificate_figure(
            {self.method: (self.curve_radii, self.curve_accuracies)}, title=title
        )

    def table(self) -> Table:
        """Return radii and accuracies as a `rich` table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(
            title="Certified accuracy", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for heading in ("radius", "times 255", "certified"):
            table.add_column(heading, justify="right")
        for radius, accuracy in zip(self.radii, self.accuracies, strict=True):
            table.add_row(f"{radius:.4g}", f"{255 * radius:.4g}", f"{accuracy:.2%}")
        return table

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(
            self.table(),
            f"{self.examples} examples, {self.clean_accuracy:.2%} right, of which half have a "
            f"radius of at least {self.median_radius:.4g}. Logits: {self.lipschitz:.4g}-Lipschitz "
            f"behind the input guard. Radii by '{self.method}', in {self.arithmetic} arithmetic.",
        )

    def __str__(self) -> str:
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=100).print(self)
        return buffer.getvalue()


def certified_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    radii: Sequence[float] = RADII_OF_255,
    input_lipschitz: float = 1.0,
    method: Method = "rows",
    threshold: float = 0.0,
    arithmetic: torch.dtype = torch.float64,
    batch_size: int = EVALUATION_BATCH,
    curve_points: int = 101,
) -> CertifiedAccuracy:
    """Certify every example, and count those that are right and stay right at the given radii.

    Arguments are those of `certified_radius`. Batches go to the model's device. What is measured
    on private data is not covered by a privacy guarantee.

    Args:
        radii: Euclidean radii, in units of the raw input; by default 0, 1, 2, 4, 8 and 16 / 255.
        curve_points: how many points the curve for plots has.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x = torch.randn(20, 4)
        >>> result = certified_accuracy(model, x, model(x).argmax(1), radii=(0.0, 0.1))
        >>> result.clean_accuracy, result.accuracies[0] >= result.accuracies[1]
        (1.0, True)
    """
    wanted = [float(radius) for radius in radii]
    if not all(0 <= radius < math.inf for radius in wanted):
        raise ValueError(f"radii must be finite and not negative, got {list(radii)}")
    if curve_points < 2:
        raise ValueError(f"curve_points must be at least 2, got {curve_points}")
    certifier = Certifier(
        model,
        input_shape=example_shape(x),
        input_lipschitz=input_lipschitz,
        method=method,
        threshold=threshold,
        arithmetic=arithmetic,
    )
    found = certifier.certify(x, batch_size=batch_size)
    kept = found.radii[certifier.is_right(found.predictions, y)].cpu()
    finite = kept[torch.isfinite(kept)]
    longest = float(finite.max()) if len(finite) else 0.0
    grid = torch.linspace(0.0, 1.02 * max(longest, *wanted, 1e-12), curve_points).tolist()
    return CertifiedAccuracy(
        radii=tuple(wanted),
        accuracies=_fractions(kept, wanted, len(x)),
        clean_accuracy=len(kept) / max(len(x), 1),
        curve_radii=tuple(grid),
        curve_accuracies=_fractions(kept, grid, len(x)),
        median_radius=float(kept.median()) if len(kept) else 0.0,
        examples=len(x),
        lipschitz=certifier.lipschitz,
        input_lipschitz=certifier.input_lipschitz,
        method=method,
        arithmetic=str(arithmetic).removeprefix("torch."),
    )


def _fractions(kept: Tensor, radii: Sequence[float], examples: int) -> tuple[float, ...]:
    """Which fraction of all examples has at least each radius."""
    ordered = kept.sort().values
    below = torch.searchsorted(ordered, torch.tensor(radii, dtype=torch.float64))
    return tuple((len(kept) - int(count)) / max(examples, 1) for count in below)
