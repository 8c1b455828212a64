"""Rényi differential privacy of a history: the second accountant, on top of `dp_accounting.rdp`.

Looser than privacy loss distributions, but it works in logarithms and therefore has no smallest
delta. The library never doubles a distance: under replace-one that is done here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from clipless.accounting._history import Runs, round_as_step
from clipless.accounting._mechanism import FixedSizeSampling, Mechanism, PoissonSampling, Relation
from clipless.accounting._pld import neighbouring
from clipless.common import not_set_error

_ROUNDING = 1e-11
"""Allowance for float64 arithmetic in the logarithm of one step's Rényi moment. Without it a step
that costs less than one rounding error counts as free, and a million of them do too."""


def epsilon(runs: Runs, delta: float, order: float | None = None) -> float:
    """Upper bound of epsilon at `delta`, by the best order or by the one that was fixed."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    if order is not None:
        total = sum(count * divergence(mechanism, order) for mechanism, count in runs)
        return max(total + conversion(order, delta), 0.0)
    orders, total = divergences(runs)
    return float(rdp.compute_epsilon(orders, total, delta)[0])


def delta(runs: Runs, epsilon: float, order: float | None = None) -> float:
    """Upper bound of delta at `epsilon`, by the best order or by the one that was fixed."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    if order is not None:
        total = sum(count * divergence(mechanism, order) for mechanism, count in runs)
        return delta_at(order, total, epsilon)
    orders, total = divergences(runs)
    return float(rdp.compute_delta(orders, total, epsilon)[0])


def conversion(order: float, delta: float) -> float:
    """Return epsilon less divergence at an order (Balle et al. 2020, theorem 21)."""
    return math.log1p(-1.0 / order) - math.log(delta * order) / (order - 1.0)


def delta_at(order: float, divergence: float, epsilon: float) -> float:
    """Return the delta at which a divergence amounts to `epsilon`: the same, solved for delta."""
    exponent = (order - 1.0) * (divergence - epsilon + math.log1p(-1.0 / order))
    return math.exp(min(exponent - math.log(order), 0.0))


@lru_cache(maxsize=4096)
def divergence(mechanism: Mechanism, order: float) -> float:
    """Return the divergence of one release at one order."""
    return float(_at_orders(mechanism, (order,))[1][0])


def divergences(runs: Runs) -> tuple[Any, Any]:
    """Return the orders and the sum over steps of the divergences at each."""
    orders, total = None, 0.0
    for mechanism, count in runs:
        orders, divergences = step_divergences(mechanism)
        total = total + count * divergences
    return orders, total


@lru_cache(maxsize=256)
def step_divergences(mechanism: Mechanism) -> tuple[Any, Any]:
    """Return the orders and the divergences of one release."""
    return _at_orders(mechanism, None)


def _at_orders(mechanism: Mechanism, orders: tuple[float, ...] | None) -> tuple[Any, Any]:
    """Return the orders, by default the library's, and the divergences of one release at each."""
    import numpy as np
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    mechanism = round_as_step(mechanism)
    distance = 2.0 if mechanism.relation is Relation.REPLACE_ONE else 1.0
    event: Any = dp_event.GaussianDpEvent(mechanism.noise_multiplier / distance)
    match mechanism.sampling:
        case PoissonSampling(rate=rate):
            event = dp_event.PoissonSampledDpEvent(rate, event)
        case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
            event = dp_event.SampledWithoutReplacementDpEvent(size, batch_size, event)
    accountant = RdpAccountant(orders, neighboring_relation=neighbouring(mechanism.relation))
    with _quiet():
        accountant.compose(event)
    found = np.asarray(accountant.orders)
    # A negative divergence is a rounding error; the library would read it as epsilon 0.
    divergences = np.maximum(accountant.rdp, 0.0)
    if isinstance(mechanism.sampling, PoissonSampling) and mechanism.sampling.max_batch_size:
        divergences = _cut(mechanism.sampling, mechanism.noise_multiplier, found, divergences)
    return found, divergences + _ROUNDING / (found - 1.0)


def _cut(sampling: PoissonSampling, sigma: float, orders: Any, plain: Any) -> Any:
    """Return the divergences of a cut Poisson sample under zero-out from those of a `plain` one.

    Indices are drawn alike from both data sets. With probability t the other examples alone fill
    the batch; given that, the example is in it with probability p, and then the outputs are two
    Gaussians at distance 1, else they are equal. Moments `exp((a-1) d(a))` are jointly convex, so
    `(1-t) exp((a-1) d(a)) + t (1 - p + p exp(a (a-1) / (2 sigma^2)))` bounds that of the whole.
    """
    import numpy as np
    from scipy import stats

    size, rate, limit = sampling.dataset_size, sampling.rate, sampling.max_batch_size
    if limit is None:
        raise not_set_error("limit")
    filled = float(stats.binom.sf(limit - 1, size - 1, rate))
    inside = float(stats.binom.sf(limit, size, rate)) * limit / size  # t p
    with np.errstate(divide="ignore"):
        terms = [
            np.log1p(-min(filled, 1.0)) + (orders - 1.0) * plain,
            np.full_like(plain, np.log(max(filled - inside, 0.0))),
            np.log(inside) + orders * (orders - 1.0) / (2.0 * sigma**2),
        ]
    return np.maximum(np.logaddexp.reduce(terms), 0.0) / (orders - 1.0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's notes on orders it leaves out, which is harmless."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
