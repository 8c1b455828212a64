"""What one private release is, as frozen data: how examples are drawn and how much noise is added.

Nothing here computes an epsilon; `clipless.privacy._accounting` interprets these objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Relation(StrEnum):
    """Which data sets count as neighbours.

    `ADD_REMOVE`: one contains one example more. `REPLACE_ONE`: one example differs.
    """

    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every example enters a step's batch independently with probability `rate`.

    With `max_batch_size`, a larger draw is cut to a uniformly random subset of that size; the
    cut is accounted for as a truncated Poisson sample. `dataset_size` is public.
    """

    dataset_size: int
    rate: float
    max_batch_size: int | None = None

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return self.rate * self.dataset_size


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """A uniformly random subset of exactly `batch_size` examples, drawn anew for every step.

    Accounted under replace-one, the relation for which its amplification is proved.
    """

    dataset_size: int
    batch_size: int

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return float(self.batch_size)


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Every step sees every example: no sampling, no amplification."""

    dataset_size: int

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return float(self.dataset_size)


Sampling = PoissonSampling | FixedSizeSampling | FullBatch


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One Gaussian release: noise of standard deviation `noise_multiplier * D` on a sampled sum.

    `D` is the add/remove sensitivity of what is released: the largest norm that ONE example can
    contribute. Under `REPLACE_ONE` two sums may differ by `2 D`; the accountant, and nobody
    else, applies that factor. All parameter groups of a training step are one such release.
    """

    noise_multiplier: float
    sampling: Sampling
    relation: Relation = Relation.ADD_REMOVE
