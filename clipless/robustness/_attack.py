"""Attacks on certificates: none may break, and their tightness is measured."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipless.common import names_moved_arguments
from clipless.robustness._certifier import (
    EVALUATION_BATCH,
    Certifier,
    Method,
    example_shape,
    plain_copy,
)
from clipless.robustness._pgd import Attack

if TYPE_CHECKING:
    from rich.table import Table

# Factors by which radii are exceeded in the search for the nearest change of decision.
RADIUS_FACTORS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_BISECTIONS = 30


@dataclass(frozen=True, kw_only=True)
class AttackOptions:
    """How hard `attack_certificates` tries.

    Args:
        steps: gradient steps from each start.
        restarts: how many starts there are.
        inside: the attack on a claim goes up to this fraction of the radius.
        ladder: the factors above the radius at which the nearest change of decision is looked for,
            in increasing order; empty to leave the search out.
        seed: of the random starts.
    """

    steps: int = 40
    restarts: int = 10
    inside: float = 0.9999
    ladder: Sequence[float] = RADIUS_FACTORS
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not 0 < self.inside <= 1:
            raise ValueError(f"inside must lie in (0, 1], got {self.inside!r}")


@dataclass(frozen=True, kw_only=True)
class CertificateAttack:
    """The outcome of an attack on certificates.

    `broken` lists the examples whose decision was changed inside their radius: none, if the
    certificates are right. `distances` are those of the nearest change of decision found (infinite
    if there was none): upper limits of the true distance, as radii are lower ones.
    """

    radii: Tensor
    distances: Tensor
    broken: tuple[int, ...]
    attacked: int
    """How many examples have a finite radius above 0."""
    inside: float
    steps: int
    restarts: int

    @property
    def ratios(self) -> Tensor:
        """Nearest change of decision over certified radius, where both are known."""
        known = (self.radii > 0) & torch.isfinite(self.radii) & torch.isfinite(self.distances)
        return self.distances[known] / self.radii[known]

    def to_dict(self) -> dict[str, Any]:
        """Return a summary as plain data."""
        ratios = self.ratios
        quantiles = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)
        points = torch.tensor(quantiles, dtype=ratios.dtype, device=ratios.device)
        values = ratios.quantile(points).tolist() if len(ratios) else []
        return {
            "examples": len(self.radii),
            "attacked": self.attacked,
            "broken": list(self.broken),
            "inside": self.inside,
            "steps": self.steps,
            "restarts": self.restarts,
            "changed": len(ratios),
            "ratio_quantiles": dict(zip(map(str, quantiles), values, strict=False)),
        }

    def table(self) -> Table:
        """Return the summary as a `rich` table."""
        from rich.table import Table

        table = Table(
            title="Attack on certificates", title_justify="left", show_header=False, box=None
        )
        table.add_column(style="dim")
        table.add_column()
        data = self.to_dict()
        table.add_row("attacked", f"{self.attacked} of {data['examples']} examples")
        table.add_row("attack", f"{self.steps} steps, {self.restarts} restarts, l2")
        table.add_row("broken", str(len(self.broken)))
        if data["ratio_quantiles"]:
            low, middle = data["ratio_quantiles"]["0.0"], data["ratio_quantiles"]["0.5"]
            found = f"smallest {low:.4g}, median {middle:.4g} ({data['changed']} examples)"
            table.add_row("nearest change found over radius", found)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=100).print(self)
        return buffer.getvalue()


@names_moved_arguments(attack=AttackOptions)
def attack_certificates(
    model: nn.Module,
    x: Tensor,
    *,
    radii: Tensor | None = None,
    attack: AttackOptions = AttackOptions(),
    input_lipschitz: float = 1.0,
    method: Method = "rows",
    threshold: float = 0.0,
    arithmetic: torch.dtype = torch.float64,
    batch_size: int = EVALUATION_BATCH,
) -> CertificateAttack:
    """Attack every example just inside its certified radius, then look for the nearest change.

    The attack is that of `pgd_attack`, in double precision; with `arithmetic=torch.float32`,
    decisions are also looked at as the model makes them in float32. A certificate that breaks
    disproves the proof. That none breaks proves nothing, but how far above the radius the attack
    begins to succeed says how much a better proof could gain at most.

    Args:
        radii: (batch,) the claims to attack, by default those of `certified_radius` with the same
            `method`, `threshold`, `input_lipschitz` and `arithmetic`.
        attack: how hard to try.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 3))
        >>> attack_certificates(model, torch.randn(20, 4), attack=AttackOptions(restarts=2)).broken
        ()
    """
    certifier = Certifier(
        model,
        input_shape=example_shape(x),
        input_lipschitz=input_lipschitz,
        method=method,
        threshold=threshold,
        arithmetic=arithmetic,
    )
    if radii is None:
        radii = certifier.certify(x, batch_size=batch_size).radii
    radii = radii.to(x.device, torch.float64)
    steps, restarts = attack.steps, attack.restarts
    search = Attack(certifier.exact, threshold=threshold, steps=steps, restarts=restarts)
    judges = [_Judge(search, torch.float64)]
    if arithmetic != torch.float64:
        coarse = Attack(
            plain_copy(certifier.network.model, arithmetic),
            threshold=threshold,
            steps=1,
            restarts=1,
        )
        judges.append(_Judge(coarse, arithmetic))
    generator = torch.Generator(device=certifier.device).manual_seed(attack.seed)
    distances = torch.full_like(radii, torch.inf)
    broken: list[int] = []
    worth = (radii > 0) & torch.isfinite(radii)
    for rows in worth.nonzero()[:, 0].split(batch_size) if bool(worth.any()) else ():
        inputs = x[rows].to(certifier.device, certifier.dtype).double()
        limits = radii[rows].to(certifier.device) * certifier.input_lipschitz
        distance = _nearest(search, judges, inputs, limits, attack, generator)
        distances[rows] = (distance / certifier.input_lipschitz).to(x.device)
        broken += rows[(distance < limits).to(x.device)].tolist()
    return CertificateAttack(
        radii=radii,
        distances=distances,
        broken=tuple(broken),
        attacked=int(worth.sum()),
        inside=attack.inside,
        steps=steps,
        restarts=restarts,
    )


class _Judge:
    """Decisions of the network in some precision, at inputs rounded to it."""

    def __init__(self, attack: Attack, dtype: torch.dtype) -> None:
        self._attack, self._dtype = attack, dtype

    def decide(self, x: Tensor) -> Tensor:
        return self._attack.decide(x.to(self._dtype))

    def distance(self, x: Tensor, moved: Tensor) -> Tensor:
        return torch.linalg.vector_norm((moved.to(self._dtype).double() - x).flatten(1), dim=1)


def _nearest(
    search: Attack,
    judges: Sequence[_Judge],
    x: Tensor,
    radii: Tensor,
    attack: AttackOptions,
    generator: torch.Generator,
) -> Tensor:
    """Distances of the nearest changes of decision found, (batch,)."""
    decided = search.decide(x)
    distances = torch.full_like(radii, torch.inf)
    for factor in (attack.inside, *attack.ladder):
        rows = torch.isinf(distances).nonzero()[:, 0]
        if len(rows) == 0:
            break
        found = search.run(x[rows], decided[rows], factor * radii[rows], generator).adversarial
        for judge in judges:
            changed = judge.decide(found) != decided[rows]
            hits = rows[changed]
            reached = _towards(judge, x[hits], decided[hits], found[changed])
            distances[hits] = torch.minimum(distances[hits], reached)
    return distances


def _towards(judge: _Judge, x: Tensor, decided: Tensor, found: Tensor) -> Tensor:
    """How far one has to go towards a point of another decision until the decision changes."""
    low = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    high = torch.ones_like(low)
    change = found - x
    shape = (-1, *([1] * (x.ndim - 1)))
    for _ in range(_BISECTIONS if len(x) else 0):
        middle = (low + high) / 2
        changed = judge.decide(x + change * middle.reshape(shape)) != decided
        low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    return judge.distance(x, x + change * high.reshape(shape))
