"""Loss and accuracy, in training and in evaluation, and the result of a training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from clipless import losses
from clipless.distributed import reshard
from clipless.losses import Loss
from clipless.privacy import guarantee_in_words
from clipless.training._data import pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLASSIFICATION = (
    losses.CrossEntropy,
    losses.BinaryCrossEntropy,
    losses.CosineSimilarity,
    losses.MulticlassHinge,
    losses.KantorovichRubinstein,
    losses.HingeKR,
)

StopReason = Literal["finished", "budget", "interrupted", "failed"]


def classifies(criterion: Loss) -> bool:
    """Whether an accuracy means something for this loss."""
    return isinstance(criterion, _CLASSIFICATION)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 for each example that is classified right, shape `(B,)`.

    Class scores `(B, K)` with class indices `(B,)`: the largest wins. One logit, or one for each
    of several labels: its sign decides, and the labels of an example are averaged.

    Example:
        >>> correct(torch.tensor([[0.1, 0.2], [3.0, 1.0]]), torch.tensor([1, 1]))
        tensor([1., 0.])
    """
    if output.ndim == 2 and output.shape[1] > 1 and target.ndim == 1:
        return (output.argmax(dim=1) == target).float()
    right = (output > 0) == (target.reshape(output.shape) > 0.5)
    return right.float() if right.ndim == 1 else right.float().flatten(1).mean(dim=1)


@dataclass
class RunningMetrics:
    """Sums over the steps of an epoch, kept on the device until somebody asks."""

    loss: Any = 0.0
    right: Any = 0.0
    examples: Any = 0.0
    steps: int = 0
    step_loss: Any = field(default=0.0)
    share: int = 1
    """Among how many processes the batches are split: the loss of one part is multiplied by it."""

    @torch.no_grad()
    def add_batch(
        self, loss: Tensor, output: Tensor, target: Tensor, weights: Tensor | None, right: bool
    ) -> None:
        """Take in one batch of the present step."""
        self.step_loss = self.step_loss + loss.detach().double()
        if right:
            hits = correct(output.detach(), target)
            kept = torch.ones_like(hits) if weights is None else weights.to(hits.device)
            self.right = self.right + (hits * kept).sum().double()
            self.examples = self.examples + kept.sum().double()

    def end_step(self) -> None:
        """The step is complete."""
        self.loss, self.step_loss, self.steps = self.loss + self.step_loss, 0.0, self.steps + 1

    def read(self) -> dict[str, float]:
        """Return the means so far. This waits for the device."""
        found = {"loss": self.share * float(self.loss) / max(self.steps, 1)}
        if float(self.examples) > 0:
            found["accuracy"] = float(self.right) / float(self.examples)
        return found

    def state_dict(self) -> dict[str, float]:
        """Return the sums as numbers."""
        return {name: float(getattr(self, name)) for name in ("loss", "right", "examples", "steps")}

    @classmethod
    def from_state_dict(cls, state: dict[str, float]) -> RunningMetrics:
        """Go on from saved sums."""
        return cls(state["loss"], state["right"], state["examples"], int(state["steps"]))


@torch.no_grad()
def evaluate(
    model: nn.Module, criterion: Loss, batches: Iterable[Any], device: torch.device
) -> dict[str, float]:
    """Return the mean loss over all examples and, for classification, the accuracy."""
    training = model.training
    model.eval()
    loss, right, count = torch.zeros(()), torch.zeros(()), 0
    try:
        for batch in batches:
            inputs, target = pair(batch, device)
            output = model(inputs)
            loss = loss.to(device) + criterion.per_example(output, target).sum().double()
            count += len(output)
            if classifies(criterion):
                right = right.to(device) + correct(output, target).sum()
    finally:
        model.train(training)
        reshard(model)
    found = {"loss": float(loss) / max(count, 1)}
    if classifies(criterion):
        found["accuracy"] = float(right) / max(count, 1)
    return found


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
