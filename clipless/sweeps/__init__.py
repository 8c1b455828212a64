"""Sweeps: many runs on Optuna, their Pareto front, and what choosing among them costs.

Importing this package is quick: optuna and torch are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from clipless.common import lazy_names

if TYPE_CHECKING:
    from clipless.sweeps._definition import Sweep
    from clipless.sweeps._pareto import pareto_front, plot_front
    from clipless.sweeps._presets import preset, presets
    from clipless.sweeps._records import Outcome, TrialRecord
    from clipless.sweeps._result import SweepResult
    from clipless.sweeps._run import read_sweep, run_sweep
    from clipless.sweeps._schema import sweep_schema
    from clipless.sweeps._space import Choices, Range, Space
    from clipless.sweeps._summary import selected, write_summary
    from clipless.sweeps._transfer import Scale, total_noise, transfer
    from clipless.sweeps.selection._cost import (
        SelectionCost,
        composition_epsilon,
        selection_epsilon,
    )
    from clipless.sweeps.selection._repetitions import Repetitions

__all__ = [
    "Sweep",
    "run_sweep",
    "read_sweep",
    "sweep_schema",
    "SweepResult",
    "TrialRecord",
    "Outcome",
    "Space",
    "Range",
    "Choices",
    "preset",
    "presets",
    "pareto_front",
    "plot_front",
    "Repetitions",
    "SelectionCost",
    "selection_epsilon",
    "composition_epsilon",
    "Scale",
    "transfer",
    "total_noise",
    "selected",
    "write_summary",
]

if not TYPE_CHECKING:
    _find, __dir__ = lazy_names(__name__)

    def __getattr__(name: str) -> object:
        try:
            return _find(name)
        except ModuleNotFoundError as error:
            if error.name != "optuna":
                raise
            raise ImportError(f"{name} needs optuna: pip install 'clipless[sweeps]'") from error
