"""`FitResult`, which `Trainer.fit` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from clipless.privacy import guarantee_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

StopReason = Literal["finished", "budget", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The outcome of a training: guarantee, steps, metrics, history.

    `epsilon` and `delta` are the guarantee of everything in the ledger. `metrics` and
    `averaged_metrics` are those of the validation data, empty if there were none, with the last
    weights and with their average. `history` has a line for each epoch; its loss and accuracy are
    those of the training data, which the guarantee does not cover. `seconds` leaves out the time
    between a kill and resuming; `resumed_from` is the step that this call went on from, or None.
    """

    epsilon: float
    delta: float
    steps: int
    stopped: StopReason
    seconds: float
    history: tuple[dict[str, Any], ...]
    metrics: dict[str, float]
    averaged_metrics: dict[str, float]
    resumed_from: int | None

    def plot(self) -> Figure:
        """Return a figure of loss, accuracy and epsilon over the epochs.

        It shows `history`, and like it is not covered by the guarantee.
        """
        from clipless.plots import training_figure

        return training_figure(self.history, title=guarantee_in_words(self.epsilon, self.delta))

    def __str__(self) -> str:
        text = (
            f"{self.stopped} after {self.steps} steps in {self.seconds:.1f} s: "
            f"{guarantee_in_words(self.epsilon, self.delta)}"
        )
        for title, numbers in (("last", self.metrics), ("averaged", self.averaged_metrics)):
            if numbers:
                text += f"\n{title} weights, validation: " + ", ".join(
                    f"{name} {value:.4g}" for name, value in numbers.items()
                )
        return text
