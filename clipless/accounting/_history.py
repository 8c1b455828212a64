"""Histories of releases, brought into the form that the accountants work on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from clipless.accounting._mechanism import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
)
from clipless.errors import PrivacyError

Accountant = str
"""`pld`; `rdp`; `rdp@12`, at one order; or a declared filter: see `RenyiFilter`."""
AccountantName = Literal["pld", "rdp", "filter"]
"""What a user asks for."""
History = Sequence[tuple[Mechanism, int]]
Runs = tuple[tuple[Mechanism, int], ...]

_MOST_NOISE_LEVELS = 64
"""Histories with more distinct noise levels are accounted for with some of them rounded down."""


def merge_releases(history: History) -> Runs:
    """Merge equal mechanisms into one run each: the order of releases does not matter.

    Runs are ordered by their last appearance, so that what grows comes last.
    """
    counts: dict[Mechanism, int] = {}
    for mechanism, count in history:
        if not isinstance(mechanism, Mechanism):
            raise TypeError(f"a history holds pairs (Mechanism, count), got {mechanism!r}")
        number = operator.index(count)
        if number < 0:
            raise ValueError(f"counts cannot be negative, got {count} of {mechanism}")
        if number > 0:
            counts[mechanism] = counts.pop(mechanism, 0) + number
    if len({mechanism.relation for mechanism in counts}) > 1:
        raise PrivacyError(
            "the history mixes releases under several relations, which have no common epsilon; "
            "use one relation for the whole run"
        )
    return tuple(counts.items())


def round_as_step(mechanism: Mechanism) -> Mechanism:
    """Return a round of cyclic sampling as the Poisson-sampled step that it costs; others as is."""
    if isinstance(mechanism.sampling, CyclicPoissonSampling):
        return replace(mechanism, sampling=mechanism.sampling.round)
    return mechanism


def without_failures(runs: Runs) -> tuple[Runs, float]:
    """Return the releases as if none could fail, and the probability that one of them does.

    Rounds of cyclic sampling become the steps that they cost.
    """
    runs = merge_releases([(round_as_step(mechanism), count) for mechanism, count in runs])
    failure = sum(mechanism.failure * count for mechanism, count in runs)
    if not failure:
        return runs, 0.0
    return merge_releases(
        [(replace(mechanism, failure=0.0), count) for mechanism, count in runs]
    ), failure


def prepare_history(runs: Runs) -> Runs:
    """Join all unsampled releases into one, and limit the number of noise levels."""
    _refuse_failures(runs)
    sampled: dict[Mechanism, dict[float, int]] = {}
    unsampled, precision = None, 0.0
    for mechanism, count in runs:
        if _takes_all(mechanism):
            # Gaussian releases compose exactly: their inverse squared multipliers add up.
            unsampled, precision = mechanism, precision + count / mechanism.noise_multiplier**2
        else:
            levels = sampled.setdefault(replace(mechanism, noise_multiplier=1.0), {})
            levels[mechanism.noise_multiplier] = count
    prepared: list[tuple[Mechanism, int]] = []
    if unsampled is not None:
        whole = FullBatch(dataset_size=unsampled.sampling.dataset_size)
        sigma = precision**-0.5
        prepared.append((replace(unsampled, noise_multiplier=sigma, sampling=whole), 1))
    if sum(map(len, sampled.values())) <= _MOST_NOISE_LEVELS:
        prepared += [run for run in runs if not _takes_all(run[0])]
        return tuple(prepared)
    for mechanism, levels in sampled.items():
        for sigma, count in _round_levels_down(levels).items():
            prepared.append((replace(mechanism, noise_multiplier=sigma), count))
    return tuple(prepared)


def _round_levels_down(levels: dict[float, int]) -> dict[float, int]:
    """Replace noise multipliers by at most 64 of them, none larger: an upper bound of the cost."""
    ratio = (max(levels) / min(levels)) ** (1.0 / _MOST_NOISE_LEVELS)
    rounded: dict[float, int] = {}
    level = 0.0
    for sigma in sorted(levels):
        if level == 0.0 or sigma > level * ratio:
            level = sigma
        rounded[level] = rounded.get(level, 0) + levels[sigma]
    return rounded


def _takes_all(mechanism: Mechanism) -> bool:
    match mechanism.sampling:
        case PoissonSampling(dataset_size=size, rate=rate, max_batch_size=limit):
            return rate == 1.0 and (limit is None or limit > size)
        case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
            return batch_size == size
    return True


def variants(runs: Runs) -> list[Runs]:
    """Return the histories of which the worst counts.

    A cut Poisson sample depends on the size of the data set. Under zero-out and replace-one that is
    N for both neighbours. In old ledgers, under add/remove, it differs: both N, compared with
    N - 1, and N + 1, compared with N, are looked at.
    """
    larger = tuple(
        (replace(m, sampling=replace(m.sampling, dataset_size=m.sampling.dataset_size + 1)), count)
        if _is_cut(m) and m.relation is Relation.ADD_REMOVE
        else (m, count)
        for m, count in runs
    )
    return [runs] if larger == runs else [runs, larger]


def _is_cut(mechanism: Mechanism) -> bool:
    sampling = mechanism.sampling
    return isinstance(sampling, PoissonSampling) and sampling.max_batch_size is not None


def _refuse_failures(runs: Runs) -> None:
    """Whoever looks at divergences alone would lose what `without_failures` adds to delta."""
    if any(mechanism.failure for mechanism, _ in runs):
        raise PrivacyError(
            "a release that may tell a rare value, with a probability that is added to delta, is "
            "not accounted for by filters and by the selection among several runs. Name the "
            "values beforehand (classes=[...])"
        )


def require_supported_sampling(runs: Runs, accountant: Accountant) -> None:
    """Raise `PrivacyError` for a sampling that `accountant` has no proved bound for."""
    _refuse_failures(runs)
    for mechanism, _ in runs:
        replaced = mechanism.relation is Relation.REPLACE_ONE
        if isinstance(mechanism.sampling, FixedSizeSampling) and not replaced:
            raise PrivacyError(
                "fixed-size sampling is accounted for under replace-one, for which its "
                "amplification is proved; use Relation.REPLACE_ONE, or PoissonSampling"
            )
        if accountant != "pld" and isinstance(mechanism.sampling, PoissonSampling):
            old = mechanism.relation is Relation.ADD_REMOVE
            if replaced or (old and _is_cut(mechanism)):
                what = "under replace-one" if replaced else "cut at a maximum size under add/remove"
                raise PrivacyError(
                    f"accountant 'rdp' has no bound for Poisson sampling {what}; use 'pld'"
                )
