"""Mean, deviation and covariance of image channels by private statistics: noisy queries.

A record's features are (channels, positions). What it contributes to a query is averaged over its
positions first, so that it moves each channel by at most one unit however many positions there
are: for C channels every query has L2 sensitivity `sqrt(C)`.

1. a histogram, on octaves, of each channel's root mean square over the record's positions. Bins
   that noise alone may have filled are dropped; the reach S is the upper edge at the 95% quantile;
2. the mean of f, clipped to [-S, S] at every position;
3. the mean of |f - mean|, clipped to S: 1.25 times it is the deviation. It is kept above the error
   that the noise may have made.

The covariance is a fourth: each record's features are scaled to norm one, so that one record moves
the sum of their products by at most one. No bound on the features has to be known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless.statistics._private_rows import PrivateRows, RowFunction
from clipless.statistics._scaling import _GAUSSIAN, _OCTAVES, _octaves, _reach, _without_noise

# Rows at a time: features of images are wide, and every step below makes a copy of them.
_PIECE = 1024


@dataclass(frozen=True)
class ChannelStatistics:
    """Channel statistics as the noisy queries found them, (channels,) float64; safe to publish."""

    mean: Tensor
    deviation: Tensor


CHANNEL_QUERIES = 3
"""How many releases `fit_channels` takes; `fit_covariance` takes one."""


def channel_query_noise(*, epsilon: float) -> float:
    """Return the noise multiplier of each query under a total budget: a rule of public numbers.

    `25 / epsilon` makes four of them together cost four percent of the noise of training; nothing
    is gained below 10.
    """
    return max(25.0 / epsilon, 10.0)


def fit_channels(
    rows: PrivateRows,
    *,
    features: RowFunction,
    channels: int,
    noise_multiplier: float,
    largest: float = math.inf,
) -> ChannelStatistics:
    """Estimate mean and deviation of every channel; three releases, written to the ledger.

    Args:
        rows: the private rows.
        features: maps the columns of some rows to (n, channels, ...) features.
        channels: how many there are.
        noise_multiplier: of each query; `channel_query_noise` has a rule.
        largest: the root mean square that no channel of a proper record exceeds, if that is known
            beforehand: counts above it are noise.

    Example:
        >>> from clipless.privacy import Ledger, Relation
        >>> ledger = Ledger.in_memory(dataset_size=5000, relation=Relation.ZERO_OUT)
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = 7 + 2 * torch.randn(5000, 1, 4, 4, generator=generator)
        >>> rows = PrivateRows(x, ledger=ledger)
        >>> found = fit_channels(rows, features=lambda x: x, channels=1, noise_multiplier=5.0)
        >>> round(found.mean.item()), round(found.deviation.item()), ledger.releases
        (7, 2, 3)
    """
    count, bound = len(rows), math.sqrt(channels)

    def by_position(function: Callable[[Tensor], Tensor]) -> RowFunction:
        """Features of rows -> their average over positions, (n, channels), piece by piece."""

        def averaged(*columns: Tensor) -> Tensor:
            pieces = zip(*(column.split(_PIECE) for column in columns), strict=True)
            parts = [
                function(features(*piece).flatten(2)).mean(dim=2)
                for piece in pieces
            ]  # fmt: skip
            return torch.cat(parts)

        return averaged

    energy = by_position(torch.square)
    histograms = rows.noisy_counts(
        lambda *columns: _octaves(energy(*columns).sqrt()),
        bins=[_OCTAVES] * channels,
        noise_multiplier=noise_multiplier,
        label="channel histograms",
    )
    possible = int(_octaves(torch.tensor(largest, dtype=torch.float64))) + 1
    octaves = torch.stack(histograms)
    octaves[:, possible:] = 0.0
    octaves = _without_noise(octaves, noise_multiplier * bound)
    reach = _reach(octaves)

    def unit(values: Tensor) -> Tensor:  # (n, channels, positions), in units of the reach
        scale = reach.to(device=values.device, dtype=values.dtype)
        return values / scale[:, None]

    sums = rows.noisy_sum(
        by_position(lambda f: _finite(unit(f)).clamp(-1, 1)),
        bound=bound,
        noise_multiplier=noise_multiplier,
        label="channel means",
    ).cpu()
    center = (sums / count).clamp(-1, 1)

    def distance(values: Tensor) -> Tensor:
        middle = center.to(device=values.device, dtype=values.dtype)
        return _finite(unit(values) - middle[:, None]).abs().clamp(max=1)

    sums = rows.noisy_sum(
        by_position(distance),
        bound=bound,
        noise_multiplier=noise_multiplier,
        label="channel deviations",
    ).cpu()
    error = noise_multiplier * bound / count
    deviation = _GAUSSIAN * reach * (sums / count).clamp(min=error, max=1)
    return ChannelStatistics(mean=center * reach, deviation=deviation)


def fit_covariance(
    rows: PrivateRows,
    *,
    features: RowFunction,
    noise_multiplier: float,
    label: str = "channel covariance",
) -> Tensor:
    """Estimate how channels vary together; one release, written to the ledger.

    `features` maps the columns of some rows to (n, channels, ...). Each row counts as much as any
    other: its features are scaled to norm one. The result, (channels, channels) in float64 on the
    CPU, is the mean of their products over rows, summed over positions: symmetric, of trace about
    one, and with noise that may make small eigenvalues negative.

    Example:
        >>> from clipless.privacy import Ledger, Relation
        >>> ledger = Ledger.in_memory(dataset_size=5000, relation=Relation.ZERO_OUT)
        >>> x = torch.randn(5000, 2, 3, generator=torch.Generator().manual_seed(0))
        >>> rows = PrivateRows(x * torch.tensor([1.0, 0.0])[:, None], ledger=ledger)
        >>> found = fit_covariance(rows, features=lambda x: x, noise_multiplier=5.0)
        >>> error = found - torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> error.abs().max().item() < 0.01, ledger.releases
        (True, 1)
    """

    def unit(*columns: Tensor) -> Tensor:
        values = features(*columns)
        flat = values.flatten(1).double()
        norms = torch.linalg.vector_norm(flat, dim=1).clamp(min=torch.finfo(flat.dtype).tiny)
        return flat.div(norms[:, None]).view(values.shape)

    total = rows.noisy_gram(unit, noise_multiplier=noise_multiplier, label=label)
    return total.cpu() / len(rows)


def decorrelation_matrix(covariance: Tensor, *, added: float) -> Tensor:
    """Return the inverse root of a noisy covariance with `added` to its eigenvalues, of norm one.

    What is added says how far directions of little variance are raised: more of it than noise makes
    of eigenvalues keeps directions of noise alone from being blown up.

    Example:
        >>> decorrelation_matrix(torch.diag(torch.tensor([4.0, 1.0, 0.25])), added=0.0).diag()
        tensor([0.2500, 0.5000, 1.0000])
    """
    values, vectors = torch.linalg.eigh(covariance)
    gains = (values.clamp(min=0) + max(added, torch.finfo(values.dtype).tiny)).rsqrt()
    return vectors * (gains / gains.max()) @ vectors.mT


def noise_radius(deviation: float, size: int) -> float:
    """The largest eigenvalue of a symmetric matrix of noise alone, about: Wigner's semicircle.

    Example:
        >>> noise_radius(0.5, 100)
        10.0
    """
    return 2 * deviation * math.sqrt(size)


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=1.0, neginf=-1.0)
