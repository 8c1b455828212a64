"""The audit of a whole training run: canaries in, training, scores, a lower bound on epsilon."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clipless.audit._canaries import Examples, draw_coins, insert_canaries
from clipless.audit._curve_audit import curve_audit
from clipless.audit._noise_family import NoiseFamily
from clipless.audit._one_run import Guesses, one_run_audit
from clipless.audit._release_scores import ReleaseScores, example_losses
from clipless.audit._result import CurveResult, OneRunResult
from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.privacy import Plan, Relation
from clipless.training import Callback, Trainer

MakeTrainer = Callable[[int], Trainer]
"""From the number of examples to a new trainer."""

Observed = Literal["releases", "model"]


def audit_training(
    make_trainer: MakeTrainer,
    data: Examples,
    *,
    canaries: Examples,
    stand_ins: Examples | None = None,
    observed: Observed = "releases",
    guesses: Guesses | Sequence[Guesses] | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> OneRunResult:
    """Train once with canaries, and return a lower bound on epsilon beside the claimed one.

    A coin for each canary decides whether it is part of the data. Afterwards the audit guesses
    which were, from what training released; see `one_run_audit`. The data are used as they are
    and are protected by nothing but training itself: audit with the model and the settings you
    mean to use, on data that need no protection, or count the run in their ledger.

    Args:
        make_trainer: returns a new `Trainer` for a number of examples. A rate that shall not
            depend on the coins can be given as `sampling=PoissonSampling(dataset_size=size, ...)`.
        data: inputs and targets. The fewer they are, the less they hide.
        canaries: inputs and targets. `orthogonal_canaries` makes some that are easy to find.
        stand_ins: what takes the place of a canary that is out. Needed, and only allowed, where
            neighbours differ by a replaced example (fixed-size batches).
        observed: `"releases"`, the noisy gradients of all steps, to which the guarantee applies;
            or `"model"`, the final weights alone, through the fall of each canary's loss.
        guesses: see `one_run_audit`: chosen in advance, or several with a correction.
        delta: by default the plan's.
        seed: makes the coins reproducible. Keep it from the trainer.

    Example:
        >>> def make_trainer(size):
        ...     model = torch.nn.Sequential(
        ...         clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(200, 2))
        ...     return Trainer(model, clipless.losses.CrossEntropy(), target_epsilon=2.0,
        ...                    batch_size=size, steps=5,
        ...                    options=clipless.privacy.PrivacyOptions(sampling="full_batch"))
        >>> from clipless.audit import orthogonal_canaries
        >>> canaries = orthogonal_canaries(200, input_shape=(200,), classes=2)
        >>> data = (torch.zeros(10, 200), torch.zeros(10).long())
        >>> result = audit_training(make_trainer, data, canaries=canaries, seed=0)
        >>> result.exposed
        False
    """
    if observed not in ("releases", "model"):
        raise ValueError(f"observed must be 'releases' or 'model', got {observed!r}")
    included = draw_coins(len(canaries[0]), seed=seed)
    trained = train_watched(
        make_trainer,
        insert_canaries(data, canaries, included, stand_ins=stand_ins),
        canaries=canaries, stand_ins=stand_ins, observed=observed,
    )  # fmt: skip
    chosen = trained.plan.delta if delta is None else delta
    return one_run_audit(
        trained.scores,
        included,
        delta=chosen,
        confidence=confidence,
        guesses=guesses,
        claimed_epsilon=trained.trainer.engine.get_epsilon(chosen),
    )


def audit_training_curve(
    make_trainer: MakeTrainer, data: Examples, *, canaries: Examples,
    stand_ins: Examples | None = None, observed: Observed = "releases",
    guesses: tuple[Guesses, ...] | None = None, delta: float | None = None,
    confidence: float = 0.95, independent: bool = False, seed: int | None = None,
) -> CurveResult:  # fmt: skip
    """Train once with canaries, and hold what was found against the whole trade-off curve.

    The training and its canaries are those of `audit_training`; the test is `curve_audit`, which
    proves more from the same scores. What the run claims is what its ledger counts.
    """
    included = draw_coins(len(canaries[0]), seed=seed)
    trained = train_watched(
        make_trainer,
        insert_canaries(data, canaries, included, stand_ins=stand_ins),
        canaries=canaries, stand_ins=stand_ins, observed=observed,
    )  # fmt: skip
    engine = trained.trainer.engine
    return curve_audit(
        trained.scores,
        included,
        family=NoiseFamily.of(
            engine.ledger.history(),
            delta=trained.plan.delta if delta is None else delta,
            accountant=trained.plan.accountant,
        ),
        confidence=confidence,
        guesses=guesses,
        independent=independent,
    )


@dataclass(frozen=True)
class WatchedRun:
    """A finished run, with the scores of the canaries."""

    trainer: Trainer
    plan: Plan
    scores: Tensor


def train_watched(
    make_trainer: MakeTrainer,
    data: Examples,
    *,
    canaries: Examples,
    stand_ins: Examples | None,
    observed: Observed,
) -> WatchedRun:
    """Train on the data and score the canaries, whether they are in the data or not."""
    trainer = make_trainer(len(data[0]))
    watch = _Watch(canaries, stand_ins, observed)
    before = _losses(trainer, canaries, stand_ins)
    trainer.callbacks = (*trainer.callbacks, watch)
    result = trainer.fit(data)
    if result.resumed_from is not None:
        raise PrivacyError("this run was resumed: an audit needs a new trainer, and a new folder")
    if observed == "releases":
        if watch.releases is None:
            raise not_set_error("releases")
        scores = watch.releases.scores
    else:
        scores = before - _losses(trainer, canaries, stand_ins)
    return WatchedRun(trainer, trainer.engine.plan, scores)


class _Watch(Callback):
    """Checks what the audit is to be about, and attaches the scores once the run is private."""

    def __init__(self, canaries: Examples, stand_ins: Examples | None, observed: Observed) -> None:
        self._canaries, self._stand_ins, self._observed = canaries, stand_ins, observed
        self.releases: ReleaseScores | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        replaces = trainer.engine.plan.relation is Relation.REPLACE_ONE
        if replaces and self._stand_ins is None:
            raise ValueError(
                "this run is private for data sets in which one example is replaced, but a canary "
                "that is left out is not replaced by anything. Give a stand-in for each canary."
            )
        if not replaces and self._stand_ins is not None:
            raise ValueError(
                "this run is private for data sets with an example or none in its place, but a "
                "stand-in makes a replacement of it, which costs more. Leave the stand-ins out."
            )
        if self._observed == "releases":
            self.releases = ReleaseScores(trainer.engine, self._canaries, stand_ins=self._stand_ins)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self.releases is not None:
            self.releases.close()


@torch.no_grad()
def _losses(trainer: Trainer, canaries: Examples, stand_ins: Examples | None) -> Tensor:
    """The canaries' losses now, less those of their stand-ins."""
    model = copy.deepcopy(trainer.model).eval()
    losses = example_losses(model, trainer.criterion, *canaries, model)
    if stand_ins is not None:
        losses = losses - example_losses(model, trainer.criterion, *stand_ins, model)
    if not bool(losses.isfinite().all()):
        raise ValueError("the loss of a canary is not finite: it cannot be ranked")
    return losses
