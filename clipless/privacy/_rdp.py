"""Rényi differential privacy of a history: the second accountant, on top of `dp_accounting.rdp`.

Looser than privacy loss distributions, but it works in logarithms and therefore has no smallest
delta. The library never doubles a distance: under replace-one that is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from clipless.privacy._history import Runs
from clipless.privacy._mechanism import FixedSizeSampling, Mechanism, PoissonSampling, Relation

_ROUNDING = 1e-11
"""Allowance for float64 arithmetic in the logarithm of one step's Rényi moment. Without it a step
that costs less than one rounding error counts as free, and a million of them do too."""


def epsilon(runs: Runs, delta: float) -> float:
    """Upper bound of epsilon at `delta`."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    orders, divergences = _divergences(runs)
    return float(rdp.compute_epsilon(orders, divergences, delta)[0])


def delta(runs: Runs, epsilon: float) -> float:
    """Upper bound of delta at `epsilon`."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    orders, divergences = _divergences(runs)
    return float(rdp.compute_delta(orders, divergences, epsilon)[0])


def _divergences(runs: Runs) -> tuple[Any, Any]:
    """Return the orders and the sum over steps of the divergences at each."""
    orders, total = None, 0.0
    for mechanism, count in runs:
        orders, divergences = _step(mechanism)
        total = total + count * divergences
    return orders, total


@lru_cache(maxsize=256)
def _step(mechanism: Mechanism) -> tuple[Any, Any]:
    """Return the orders and the divergences of one release."""
    import numpy as np
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    replaced = mechanism.relation is Relation.REPLACE_ONE
    distance = 2.0 if replaced else 1.0
    event: Any = dp_event.GaussianDpEvent(mechanism.noise_multiplier / distance)
    match mechanism.sampling:
        case PoissonSampling(rate=rate):
            event = dp_event.PoissonSampledDpEvent(rate, event)
        case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
            event = dp_event.SampledWithoutReplacementDpEvent(size, batch_size, event)
    accountant = RdpAccountant(
        neighboring_relation=NeighboringRelation.REPLACE_ONE
        if replaced
        else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    with _quiet():
        accountant.compose(event)
    orders = accountant.orders
    # A negative divergence is a rounding error; the library would read it as epsilon 0.
    return orders, np.maximum(accountant.rdp, 0.0) + _ROUNDING / (orders - 1.0)


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
