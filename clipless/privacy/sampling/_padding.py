"""Padded sizes of batches: how many rows they have, and how many of those stay empty on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clipless.accounting import CyclicPoissonSampling, PoissonSampling, Sampling
from clipless.errors import PrivacyError
from clipless.privacy.sampling._samplers import largest_sample, validate_sampling

CUT_PROBABILITY = 1e-9
"""How often, at most, the default padding cuts a step's sample."""
MOST_SIZES = 8
"""How many sizes batches may have: compilers keep no more versions of a function than that."""
_USUAL_SIZES = 3
_WORTH_A_SIZE = 0.01
"""A further size, which is compiled and recorded too, must save this share of the rows."""
_MULTIPLE = 8
_MOST_CANDIDATES = 256


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The sizes of padded batches: each has the smallest that its examples fit in.

    `sizes`: increasing, in examples. `batches`: how many a process gets in each step.
    `empty_share`: the expected number of rows that are padding over that of all rows, of all
    batches of a step on all processes: exact, from the binomial law of the sample's size.

    Sizes follow from public numbers. Which of them a batch has follows from the size of the sample,
    which is private, as is that of a batch that is not padded: nobody is told, but who can time the
    steps may guess it. With one size, nothing about a batch depends on the sample's size.

    Example:
        >>> sampling = PoissonSampling(dataset_size=50_000, rate=512 / 50_000, max_batch_size=656)
        >>> padding = padding_of(sampling)
        >>> padding.sizes, f"{padding.empty_share:.1%}", padding.fitting(529)
        ((520, 552, 656), '4.3%', 552)
    """

    sizes: tuple[int, ...]
    batches: int = 1
    empty_share: float = 0.0

    def fitting(self, examples: int) -> int:
        """Return the size of a batch of so many examples."""
        return smallest_holding(self.sizes, examples)

    def per_batch(self, part: int) -> int:
        """Return how many examples a full batch holds if a process has `part` in a step."""
        return self.fitting(math.ceil(part / self.batches))

    def describe(self, examples: bool = True) -> str:
        """Return in words which sizes there are, and how much is empty if `examples` are sampled.

        A user's records are fewer than there is room for, which the law of samples does not tell.
        """
        *others, last = map(str, self.sizes)
        sizes = f"{', '.join(others)} or {last}" if others else last
        unit = "examples" if examples else "users"
        empty = f", on average {self.empty_share:.1%} of which are empty" if examples else ""
        return f"padded to {sizes} {unit}{empty}"

    @property
    def largest(self) -> int:
        """The size of the largest batch."""
        return self.sizes[-1]


def smallest_holding(sizes: Sequence[int], examples: int) -> int:
    """Return the smallest of some increasing sizes that holds so many examples."""
    for size in sizes:
        if size >= examples:
            return size
    raise PrivacyError(
        f"{examples} examples do not fit into a batch padded to {sizes[-1]}: the loader and what "
        "it reads disagree about the size of a step's sample. Please report this."
    )


def padded_sampling(sampling: Sampling) -> Sampling:
    """Return the description of `sampling` when every step is held in a limited number of rows.

    Poisson samples without a `max_batch_size` get one that cuts at most one step in 10^9: the
    quantile of the binomial law that a sample's size has, rounded up to a multiple of 8. It depends
    on nothing but the data set's size and the rate, which are public. The cut is part of the
    mechanism: account for what this function returns, not for what it was given.

    Example:
        >>> padded_sampling(PoissonSampling(dataset_size=50_000, rate=512 / 50_000)).max_batch_size
        656
    """
    validate_sampling(sampling)
    if isinstance(sampling, CyclicPoissonSampling):
        raise PrivacyError(
            "samples of groups are not padded to a fixed size, which compiled steps need: the cut "
            "has no accounting. Use PoissonSampling, or epochs in a fixed order"
        )
    if not isinstance(sampling, PoissonSampling) or sampling.max_batch_size is not None:
        return sampling
    # By halving: probabilities of larger samples decrease.
    low, high = 0, sampling.dataset_size  # P(size > high) <= CUT_PROBABILITY
    while low < high:
        middle = (low + high) // 2
        if _larger(sampling, middle) <= CUT_PROBABILITY:
            high = middle
        else:
            low = middle + 1
    limit = _MULTIPLE * math.ceil(max(low, 1) / _MULTIPLE)
    # No sample is larger than the data set, so a limit that high would cut nothing.
    return sampling if limit >= sampling.dataset_size else replace(sampling, max_batch_size=limit)


def padding_of(
    sampling: Sampling, *, sizes: int | None = None, processes: int = 1, batches: int = 1
) -> Padding:
    """Choose the sizes of padded batches, so that few rows are expected to be empty.

    `sizes`: how many, at most; by default up to three, as long as one more saves 1% of the rows.
    `processes`: among how many a step's sample is divided; `batches`: into how many micro-batches
    the part of each.
    """
    largest, parts = largest_sample(sampling), processes * batches
    if not isinstance(sampling, PoissonSampling) or sampling.rate == 1.0:
        chosen: tuple[int, ...] = (largest,)
    else:
        chosen = _best_sizes(sampling, sizes)
    own = tuple(sorted({math.ceil(size / parts) for size in chosen}))
    padding = Padding(sizes=own, batches=batches)
    counts, probabilities = _law(sampling)
    rows = float(probabilities @ _rows_of(counts, padding, processes))
    return replace(padding, empty_share=1 - float(probabilities @ counts) / rows)


def _best_sizes(sampling: PoissonSampling, sizes: int | None) -> tuple[int, ...]:
    """Return the sizes of a step with the fewest rows on average, among multiples of 8."""
    largest = largest_sample(sampling)
    mean = sampling.expected_batch_size
    spread = math.sqrt(mean * (1 - sampling.rate))
    low, high = max(0.0, mean - 4 * spread), min(float(largest), mean + 8 * spread)
    multiple = _MULTIPLE * math.ceil((high - low) / _MULTIPLE / _MOST_CANDIDATES)
    first = max(1, math.ceil(low / multiple)) * multiple
    candidates = np.append(np.arange(first, min(high, largest - 0.5), multiple), largest)
    below = 1.0 - _larger(sampling, candidates)
    below[-1] = 1.0
    # Row k holds the fewest rows with k + 1 sizes of which the last is a candidate.
    fewest, before = candidates * below, list[Any]()
    best: list[tuple[float, tuple[int, ...]]] = [(float(fewest[-1]), (largest,))]
    usual = _USUAL_SIZES if sizes is None else sizes
    for _ in range(1, min(usual, len(candidates))):
        between = np.where(
            np.arange(len(candidates))[:, None] < np.arange(len(candidates)),
            fewest[:, None] + candidates * (below - below[:, None]), np.inf,
        )  # fmt: skip
        before.append(between.argmin(0))
        fewest = between.min(0)
        best.append((float(fewest[-1]), _followed_back(candidates, before)))
    chosen = best[0]
    for rows, found in best[1:]:
        if sizes is None and chosen[0] - rows < _WORTH_A_SIZE * chosen[0]:
            break
        if rows < chosen[0]:
            chosen = rows, found
    return chosen[1]


def _followed_back(candidates: Any, before: Sequence[Any]) -> tuple[int, ...]:
    place, found = len(candidates) - 1, [int(candidates[-1])]
    for earlier in reversed(before):
        place = int(earlier[place])
        found.append(int(candidates[place]))
    return tuple(reversed(found))


def _rows_of(counts: Any, padding: Padding, processes: int) -> Any:
    """Return the rows of all batches of a step, for each size of its sample."""
    sizes, batches = np.array(padding.sizes), padding.batches
    total = np.zeros(len(counts))
    larger = counts % processes  # so many processes have one example more than the others
    for part, times in (
        (counts // processes, processes - larger),
        (counts // processes + 1, larger),
    ):
        part = np.minimum(part, sizes[-1] * batches)  # where there are none, it does not count
        at_once = sizes[np.searchsorted(sizes, -(-part // batches))]
        full, rest = part // at_once, part % at_once
        empty = batches - full - (rest > 0)
        rows = full * at_once + (rest > 0) * sizes[np.searchsorted(sizes, rest)] + empty * sizes[0]
        total += times * rows
    return total


def _law(sampling: Sampling) -> tuple[Any, Any]:
    """Return the sizes that a sample may have, and how probable each is."""
    largest = largest_sample(sampling)
    if not isinstance(sampling, PoissonSampling) or sampling.rate == 1.0:
        return np.array([largest]), np.ones(1)
    mean = sampling.expected_batch_size
    reach = 40 * (math.sqrt(mean) + 1)  # beyond it, float64 knows no probabilities
    counts = np.arange(max(0, int(mean - reach)), largest + 1)
    below = 1.0 - _larger(sampling, counts)
    below[-1] = 1.0  # what is cut has the largest size
    return counts, np.diff(below, prepend=0.0)


def _larger(sampling: PoissonSampling, size: Any) -> Any:
    """Return how probable a sample of more than `size` examples is, before it is cut."""
    from scipy.special import betainc

    number = sampling.dataset_size
    rest = np.maximum(number - size, 1)
    found = np.where(np.asarray(size) >= number, 0.0, betainc(size + 1.0, rest, sampling.rate))
    return found if found.ndim else float(found)
