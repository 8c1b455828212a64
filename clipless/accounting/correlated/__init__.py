"""Correlated noise: strategies, their sensitivities, the error they leave, and what they cost."""

from clipless.accounting.correlated._banded import BandedStrategy
from clipless.accounting.correlated._buffered import BufferedStrategy, optimised_buffers
from clipless.accounting.correlated._choice import NoiseCandidate, NoiseMode, noise_candidates
from clipless.accounting.correlated._cost import (
    CyclicPoisson,
    FixedOrderEpochs,
    Strategy,
    strategy_from_dict,
)
from clipless.accounting.correlated._error import error_by_step, largest_error, mean_error
from clipless.accounting.correlated._optimise import optimised_strategy
from clipless.accounting.correlated._sensitivity import (
    banded_sensitivity,
    pass_costs,
    toeplitz_sensitivity,
)
from clipless.accounting.correlated._workload import OptimizerWorkload

__all__ = [
    "BandedStrategy",
    "BufferedStrategy",
    "Strategy",
    "strategy_from_dict",
    "FixedOrderEpochs",
    "CyclicPoisson",
    "NoiseCandidate",
    "NoiseMode",
    "noise_candidates",
    "OptimizerWorkload",
    "optimised_buffers",
    "optimised_strategy",
    "error_by_step",
    "mean_error",
    "largest_error",
    "banded_sensitivity",
    "pass_costs",
    "toeplitz_sensitivity",
]
