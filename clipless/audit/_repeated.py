"""A lower bound on epsilon from many runs on two neighbouring data sets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from clipless.audit._canaries import Examples, insert_canaries
from clipless.audit._result import RepeatedResult
from clipless.audit._statistics import Array, exact_ends, require_confidence
from clipless.audit._training import MakeTrainer, Observed, WatchedRun, train_watched
from clipless.errors import PrivacyError
from clipless.privacy import PoissonSampling


def distinguishing_audit(
    scores_out: Tensor,
    scores_in: Tensor,
    *,
    delta: float,
    confidence: float = 0.95,
    claimed_epsilon: float | None = None,
) -> RepeatedResult:
    """Return what independent runs on two neighbouring data sets prove about epsilon.

    Says "in" when a score is above a threshold. For every threshold, (epsilon, delta)-DP limits
    the true positive rate to `e^epsilon FPR + delta`, and the true negative rate likewise. Every
    other score chooses the threshold; the rest, which had no say in it, gives exact bounds
    (Clopper-Pearson) of both rates, which hold together with the stated confidence.

    Args:
        scores_out, scores_in: one score for each run on the data without and with the canary.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> out, within = torch.randn(2, 1000, generator=generator)
        >>> 1 < distinguishing_audit(out, within + 2, delta=1e-3).lower_bound < 3
        True
    """
    require_confidence(confidence)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta!r}")
    out, within = (each.detach().cpu().double().flatten() for each in (scores_out, scores_in))
    if min(len(out), len(within)) < 4:
        raise ValueError("at least four runs on each data set are needed")
    if not bool(out.isfinite().all() and within.isfinite().all()):
        raise ValueError("some scores are not finite")

    candidates = torch.cat([out[::2], within[::2]]).unique()
    bounds = _bounds(candidates, out[::2], within[::2], delta, confidence)[0]
    threshold = candidates[int(bounds.argmax())].reshape(1)
    out, within = out[1::2], within[1::2]
    bounds, rate_low, false_high = _bounds(threshold, out, within, delta, confidence)
    return RepeatedResult(
        lower_bound=float(bounds[0]),
        confidence=confidence,
        delta=delta,
        claimed_epsilon=claimed_epsilon,
        runs=len(out) + len(within),
        true_positive_rate=float((within > threshold).double().mean()),
        true_positive_rate_low=float(rate_low[0]),
        false_positive_rate=float((out > threshold).double().mean()),
        false_positive_rate_high=float(false_high[0]),
    )


def _bounds(
    thresholds: Tensor, out: Tensor, within: Tensor, delta: float, confidence: float
) -> tuple[Array, Array, Array]:
    """The bound of each threshold, with the lowest TPR and the highest FPR that it rests on.

    Both directions follow from these two: `1 - FPR` and `1 - TPR` are bounded by them as well.
    """
    positives = (within[None] > thresholds[:, None]).sum(dim=1).numpy()
    false = (out[None] > thresholds[:, None]).sum(dim=1).numpy()
    rate_low, _ = exact_ends(positives, len(within), confidence)
    _, false_high = exact_ends(false, len(out), confidence)
    found = np.maximum(
        _log_ratios(rate_low - delta, false_high),
        _log_ratios(1 - false_high - delta, 1 - rate_low),
    )
    return found, rate_low, false_high


def _log_ratios(above: Array, below: Array) -> Array:
    """`log(above / below)` where that is positive, and 0 elsewhere; `below` is never 0."""
    return np.log(np.maximum(above, below) / below)


def audit_repeated_training(
    make_trainer: MakeTrainer,
    data: Examples,
    *,
    canary: Examples,
    stand_in: Examples | None = None,
    runs: int,
    observed: Observed = "releases",
    delta: float | None = None,
    confidence: float = 0.95,
) -> RepeatedResult:
    """Train `runs` times without and `runs` times with a canary, and try to tell which is which.

    It takes hundreds of runs, and at most `log(runs / 7.4)` can be proved at 95%; but one canary
    hides behind no other, and delta may be as large as one likes. For small models and few steps.

    Args:
        make_trainer: returns a new `Trainer` for a number of examples, with randomness of its own
            for every call: runs that repeat each other's noise are refused. A sampling rate must
            not depend on the number of examples, which differs by one: give
            `sampling=PoissonSampling(dataset_size=size, rate=...)`, or the full batch.
        canary: one example, inputs (1, ...) and targets (1, ...).
        stand_in: what takes its place; for replace-one, as for `audit_training`.

    Example:
        >>> def make_trainer(size):
        ...     model = torch.nn.Sequential(
        ...         clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        ...     return clipless.training.Trainer(
        ...         model, clipless.losses.CrossEntropy(), noise_multiplier=2.0, steps=1,
        ...         batch_size=size,
        ...         options=clipless.privacy.PrivacyOptions(sampling="full_batch"))
        >>> data = (torch.zeros(10, 4), torch.zeros(10).long())
        >>> canary = (torch.ones(1, 4), torch.ones(1).long())
        >>> result = audit_repeated_training(make_trainer, data, canary=canary, runs=10)
        >>> result.lower_bound
        0.0
    """
    if len(canary[0]) != 1 or runs < 4:
        raise ValueError(
            f"one canary and at least 4 runs are needed, got {len(canary[0])} and {runs}"
        )
    included = torch.tensor([False]), torch.tensor([True])
    worlds = [insert_canaries(data, canary, coin, stand_ins=stand_in) for coin in included]
    scores: list[list[float]] = [[], []]
    for run in range(runs):
        trained = [
            train_watched(
                make_trainer, examples, canaries=canary, stand_ins=stand_in, observed=observed
            )
            for examples in worlds
        ]
        if run == 0:
            _require_same_rate(trained)
        for found, each in zip(scores, trained, strict=True):
            found.append(float(each.scores))
    if any(len(set(found)) < runs for found in scores):
        raise PrivacyError(
            "two runs on the same data ended with the same score: they used the same noise. Let "
            "make_trainer give every trainer another seed, or none."
        )
    chosen = trained[0].plan.delta if delta is None else delta
    return distinguishing_audit(
        torch.tensor(scores[0], dtype=torch.float64),
        torch.tensor(scores[1], dtype=torch.float64),
        delta=chosen,
        confidence=confidence,
        claimed_epsilon=max(each.trainer.engine.get_epsilon(chosen) for each in trained),
    )


def _require_same_rate(trained: list[WatchedRun]) -> None:
    """A rate of b/N would shift the sums of all other examples as much as a canary does."""
    rates = {
        each.plan.sampling.rate
        for each in trained
        if isinstance(each.plan.sampling, PoissonSampling)
    }
    if len(rates) > 1:
        raise ValueError(
            f"the sampling rate depends on the number of examples ({sorted(rates)}), which the "
            "guarantee treats as public. Give the trainer the same rate for both data sets: "
            "sampling=PoissonSampling(dataset_size=size, rate=...)."
        )
