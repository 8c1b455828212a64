"""Scaling of table columns by private statistics: three noisy queries, however many columns.

Every query has L2 sensitivity `sqrt(d)` for d columns and the same noise multiplier:

1. a histogram of x on octaves of either sign for every column (of hashed categories for categorical
   ones). Bins that noise alone may have filled are dropped; the reach S is the upper edge of |x| at
   the 95% quantile;
2. the mean of x, clipped to [-S, S];
3. the mean of |x - mean|, clipped to 2 S: 1.25 times it is the spread, which is the standard
   deviation of a Gaussian column. It is kept above the error that the noise may have made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.statistics._private_rows import PrivateRows, RowFunction

_LOWEST, _HIGHEST = -20, 40  # octaves: 2^-20 to 2^40
_OCTAVES = _HIGHEST - _LOWEST + 1
_SIGNED = 2 * _OCTAVES - 1  # negative ones from the largest on, zero, positive ones
_QUANTILE = 0.95
_FALSE_BINS = 1e-3  # expected number, in a whole table, of far bins that noise alone has filled
_MISSING = _SIGNED  # the last bin
_GAUSSIAN = 1.25  # sqrt(pi / 2): standard deviation over mean deviation


@dataclass(frozen=True)
class Scaling:
    """Centre and spread of columns as the noisy queries found them; safe to publish.

    `center`, `spread`, `missing` (the fraction of missing values) and `switches` (whether it seems
    to hold 0 and one other value only) have an entry for each numeric column. `categories` has, for
    each categorical column, the fractions of rows in each hash bucket, missing values in the last
    one. `resolution` is the standard deviation of the noise in a fraction. `occupied` has, for each
    numeric column, the ends (k, 2) of the octaves that hold rows, in order.
    """

    center: Tensor
    spread: Tensor
    missing: Tensor
    switches: Tensor
    categories: tuple[Tensor, ...]
    resolution: float
    occupied: tuple[Tensor, ...] = ()


def query_noise(*, rows: int, columns: int, epsilon: float) -> float:
    """Return the noise multiplier of each of the three queries: a rule of public numbers.

    Counts of N rows then have errors of at most about a percent of N, as far as a small part of
    the budget buys that: `clip(0.01 N / sqrt(d), 12, 20)` at epsilon 1.
    """
    wanted = 0.01 * rows / math.sqrt(max(columns, 1))
    return min(max(wanted, 12.0), 20.0) * noise_scale(epsilon)


def noise_scale(epsilon: float) -> float:
    """Return how much the noise of a query grows, or shrinks, from epsilon 1 to `epsilon`, if it is
    to cost the same part of the budget.

    By the conversion of concentrated privacy, `epsilon = rho + 2 sqrt(rho L)` with L of about 10,
    the logarithm of 1/delta; the noise of a part of rho is proportional to `rho^-1/2`.
    """
    allowance = math.sqrt(10)
    return (math.sqrt(11) - allowance) / (math.sqrt(10 + epsilon) - allowance)


def fit_scaling(
    rows: PrivateRows,
    *,
    numbers: RowFunction,
    numeric: int,
    codes: RowFunction | None = None,
    buckets: Sequence[int] = (),
    noise_multiplier: float,
    ask_all: bool = False,
) -> Scaling:
    """Estimate centre and spread of columns privately; three releases, written to the ledger.

    Args:
        rows: the private rows.
        numbers: maps the columns of `rows` to (n, `numeric`) numbers, NaN where missing.
        numeric: how many numeric columns there are; with none, the second and third query fall
            away.
        codes: maps them to (n, len(buckets)) bucket numbers of categorical columns.
        buckets: how many buckets each categorical column has.
        noise_multiplier: of each query; `query_noise` has a rule.
        ask_all: ask the second and third query even if there is no numeric column: for callers
            who learn that from an earlier answer, and have fixed the number of queries before.

    Example:
        >>> from clipless.privacy import Ledger, Relation
        >>> ledger = Ledger.in_memory(dataset_size=5000, relation=Relation.ZERO_OUT)
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = 7 + 2 * torch.randn(5000, 1, generator=generator)
        >>> rows = PrivateRows(x, ledger=ledger)
        >>> found = fit_scaling(rows, numbers=lambda x: x, numeric=1, noise_multiplier=10.0)
        >>> round(found.center.item()), round(found.spread.item()), ledger.releases
        (7, 2, 3)
    """
    count, columns = len(rows), numeric + len(buckets)

    def bins_of(*row: Tensor) -> Tensor:
        parts = [_signed_octaves(numbers(*row))] if numeric else []
        return torch.cat([*parts, *([codes(*row)] if codes is not None and buckets else [])], 1)

    histograms = rows.noisy_counts(
        bins_of,
        bins=[_SIGNED + 1] * numeric + list(buckets),
        noise_multiplier=noise_multiplier,
        label="column histograms",
    )
    deviation = noise_multiplier * math.sqrt(columns)
    resolution = deviation / count
    categories = tuple((each / count).clamp(min=0) for each in histograms[numeric:])
    if not numeric:
        for label in ("column means", "column spreads") if ask_all else ():
            rows.noisy_sum(_no_number, bound=1.0, noise_multiplier=noise_multiplier, label=label)
        nothing = torch.zeros(0, dtype=torch.float64)
        return Scaling(nothing, nothing, nothing, nothing.bool(), categories, resolution)
    histogram = torch.stack(histograms[:numeric])
    missing = (histogram[:, _MISSING] / count).clamp(0, 1)
    signed = _without_noise(histogram[:, :_SIGNED], deviation)
    octaves = _magnitudes(signed)
    reach = _reach(octaves)
    switches = (octaves[:, 1:] > 0).sum(dim=1) <= 1  # one octave, besides zero
    # Sums are divided by the rows that have a value, which are few only if that is plain.
    present = ((1 - missing) * count).clamp(min=max(2 * deviation, 1.0))

    def mean_part(*row: Tensor) -> Tensor:
        x = torch.nan_to_num(numbers(*row).double(), nan=0.0)
        return (x / reach).clamp(-1, 1)

    bound = math.sqrt(numeric)
    sums = rows.noisy_sum(
        mean_part, bound=bound, noise_multiplier=noise_multiplier, label="column means"
    )
    center = (sums / present).clamp(-1, 1) * reach

    def deviation_part(*row: Tensor) -> Tensor:
        x = numbers(*row).double()
        return torch.nan_to_num(((x - center).abs() / (2 * reach)).clamp(max=1), nan=0.0)

    sums = rows.noisy_sum(
        deviation_part, bound=bound, noise_multiplier=noise_multiplier, label="column spreads"
    )
    error = noise_multiplier * bound / present
    spread = _GAUSSIAN * 2 * reach * torch.maximum(sums / present, error).clamp(max=1)
    occupied = tuple(_ends(each) for each in signed)
    return Scaling(center, spread, missing, switches, categories, resolution, occupied)


def _no_number(first: Tensor, *others: Tensor) -> Tensor:
    return torch.zeros(len(first), 1, dtype=torch.float64)


def _octaves(x: Tensor) -> Tensor:
    """The bin of every number: i for |x| up to 2^(lowest + i), and one more for NaN."""
    exponent = torch.frexp(x.double().abs())[1]  # |x| in [2^(e-1), 2^e)
    # frexp gives 0 for zeros and infinities.
    exponent = torch.where(x == 0, _LOWEST, exponent)
    exponent = torch.where(x.isinf(), _HIGHEST, exponent)
    bins = (exponent.clamp(_LOWEST, _HIGHEST) - _LOWEST).long()
    return torch.where(x.isnan(), _OCTAVES, bins)


def _signed_octaves(x: Tensor) -> Tensor:
    """The bin of every number by octave and sign: zero in the middle, the last one for NaN."""
    size = _octaves(x)
    return torch.where(x.isnan(), _MISSING, _OCTAVES - 1 + torch.where(x < 0, -size, size))


def _magnitudes(signed: Tensor) -> Tensor:
    """Counts of |x| by octave, from those of x: (d, octaves)."""
    middle = _OCTAVES - 1
    negative = signed[:, :middle].flip(1)
    return torch.cat([signed[:, middle, None], signed[:, middle + 1 :] + negative], 1)


def _ends(counts: Tensor) -> Tensor:
    """The lower and upper ends of one column's bins that hold rows: (k, 2). Zero is one point."""
    place = torch.nonzero(counts > 0).flatten() - (_OCTAVES - 1)
    outer = torch.exp2((place.abs() + _LOWEST).double()) * place.sign()
    return torch.stack([outer, outer / 2], 1).sort(dim=1).values


def _without_noise(octaves: Tensor, deviation: float) -> Tensor:
    """Drop the bins that noise alone may have filled; every column keeps its fullest.

    Of the bins within two octaves of a column's fullest, those above the noise that one column
    may well have are kept; farther ones must be beyond what noise does once in a thousand tables.
    One bin too many nearby moves the reach by an octave or two; one far away destroys the column.
    """
    weak = deviation * math.sqrt(2 * math.log(2 * octaves.numel()))
    strong = deviation * NormalDist().inv_cdf(1 - _FALSE_BINS / octaves.numel())
    anchors = octaves > strong
    anchors.scatter_(1, octaves.argmax(dim=1, keepdim=True), True)
    near = F.max_pool1d(anchors.double(), kernel_size=5, stride=1, padding=2) > 0
    counts = torch.where((octaves > weak) & near, octaves, 0.0)
    empty = counts.sum(dim=1) == 0
    counts[empty, octaves.argmax(dim=1)[empty]] = 1.0
    return counts


def _reach(counts: Tensor) -> Tensor:
    """The upper edge of the octave at the 95% quantile of each column, (d,)."""
    below = counts.cumsum(dim=1) / counts.sum(dim=1, keepdim=True)
    first = (below >= _QUANTILE).double().argmax(dim=1)
    return torch.exp2((first + _LOWEST).double())
