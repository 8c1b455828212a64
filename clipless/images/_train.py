"""Private training of an image classifier under one total budget, statistics included."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless.common import not_set_error
from clipless.images._features import ImageFeatures
from clipless.images._model import build_network, decorrelation, standardization, trained_part
from clipless.images._rule import ImageRule
from clipless.losses import CrossEntropy
from clipless.privacy import (
    Budget,
    FullBatch,
    Ledger,
    Mechanism,
    PrivacyOptions,
    PrivacyReport,
    Relation,
    named_sampling,
)
from clipless.statistics import CHANNEL_QUERIES, PrivateRows, fit_channels, fit_covariance
from clipless.training import LayerAdam, Trainer, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class TrainedImages:
    """A trained classifier and what it cost."""

    model: nn.Sequential
    """On pixels, (batch, colours, height, width) -> (batch, classes), in evaluation mode."""
    privacy: PrivacyReport
    """Of everything in the ledger: the statistics and all steps of training."""
    rule: ImageRule
    steps: int
    seconds: float

    @torch.no_grad()
    def predict(self, images: Tensor, *, batch_size: int = 500) -> Tensor:
        """Return the logits of images, (n, classes), on the device that they are on."""
        return torch.cat([self.model(part) for part in images.split(batch_size)])

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the part of the images that are classified correctly."""
        return (self.predict(images).argmax(1) == labels).double().mean().item()


def train_images(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    epsilon: float,
    delta: float | None = None,
    rule: ImageRule | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    features: Tensor | None = None,
    progress: bool | None = False,
) -> TrainedImages:
    """Train a linear layer on standardised scattering features of private images.

    Guarantee: the model as a whole, with the means and deviations in it, is (epsilon,
    delta)-differentially private with respect to replacing one image by an empty record.
    Features are functions of single images; four noisy queries standardise and decorrelate them,
    and training spends what is left. Everything is in `ledger`.

    Args:
        images: (n, colours, height, width) pixels from 0 to 1; training runs on their device.
        labels: (n,) class numbers; an image whose label is none of them contributes nothing.
        classes: how many classes there are: public.
        rule: by default that of `ImageRule.choose`.
        ledger: goes on with this one, or is kept in this file; in memory by default.
        features: those of the images, by `ImageFeatures.compute`, if several runs share them.
        progress: show a bar on the standard error; None shows it on a terminal, and elsewhere says
            how long it will take if that is minutes.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> y = torch.randint(2, (2000,), generator=generator)
        >>> x = torch.rand(2000, 1, 8, 8, generator=generator)
        >>> x *= 0.2 + 0.8 * y[:, None, None, None]
        >>> trained = train_images(x, y, classes=2, epsilon=8.0)
        >>> trained.accuracy(x, y) > 0.9, trained.privacy.epsilon <= 8.0
        (True, True)
    """
    if images.ndim != 4 or len(images) != len(labels):
        raise ValueError(
            "train_images needs images (n, colours, height, width) and as many labels, got "
            f"{tuple(images.shape)} and {tuple(labels.shape)}"
        )
    count = len(images)
    chosen = rule or ImageRule.choose(examples=count, epsilon=epsilon)
    begun = time.monotonic()
    owned = not isinstance(ledger, Ledger)
    book = (
        ledger
        if isinstance(ledger, Ledger)
        else Ledger(ledger, dataset_size=count, relation=Relation.ZERO_OUT)
    )
    try:
        shape = (images.shape[1], images.shape[2], images.shape[3])
        network = build_network(chosen, input_shape=shape, classes=classes).to(images.device)
        front = network.get_submodule("features")
        if not isinstance(front, ImageFeatures):
            raise TypeError(f"the network's features are {type(front).__name__}")
        inputs = front.compute(images, note=progress is not False) if features is None else features
        if tuple(inputs.shape) != (count, *front.output_shape):
            raise ValueError(
                f"features of {count} images have shape {(count, *front.output_shape)}, got "
                f"{tuple(inputs.shape)}"
            )
        budget = Budget.for_ledger(book, epsilon=epsilon, delta=delta)
        rows = [PrivateRows(inputs, labels, ledger=book, present=_known(labels, classes))]
        del inputs, features  # `_train` lets go of them as well once they are standardised
        with book.held():  # trainings that share a ledger come one after the other
            _require_budget(chosen, count, book, budget)
            steps, report = _train(
                rows.pop(), network, chosen, budget, book, largest=front.largest, progress=progress
            )
    finally:
        if owned:
            book.close()
    return TrainedImages(
        model=network.eval(),
        privacy=report,
        rule=chosen,
        steps=steps,
        seconds=time.monotonic() - begun,
    )


def _known(labels: Tensor, classes: int) -> Tensor:
    return (labels >= 0) & (labels < classes)


def _require_budget(rule: ImageRule, count: int, ledger: Ledger, budget: Budget) -> None:
    """Refuse, before the first query, a budget that has no room for queries and training."""
    whole = FullBatch(dataset_size=count)
    query = Mechanism(noise_multiplier=rule.query_noise, sampling=whole, relation=ledger.relation)
    queries = [(query, CHANNEL_QUERIES + (rule.ridge is not None))]
    budget.require_all(ledger, queries)
    sampling = named_sampling(
        "full_batch" if rule.full_batch else "poisson", count, rule.batch_size
    )
    budget.noise_multiplier(ledger, steps=rule.steps, sampling=sampling, before=queries)


def _train(
    rows: PrivateRows,
    network: nn.Sequential,
    rule: ImageRule,
    budget: Budget,
    ledger: Ledger,
    *,
    largest: float,
    progress: bool | None,
) -> tuple[int, PrivacyReport]:
    """Standardise the features in custody, and train the head in place."""
    statistics = fit_channels(
        rows,
        features=lambda features, labels: features,
        channels=rows.shapes[0][0],
        noise_multiplier=rule.query_noise,
        largest=largest,
    )
    device = next(network.parameters()).device
    layer = standardization(rule, statistics).to(device)
    network.add_module("standardize", layer)
    rows = rows.map_rows(lambda features, labels: (layer(features), labels))
    if rule.ridge is not None:
        covariance = fit_covariance(
            rows, features=lambda features, labels: features, noise_multiplier=rule.query_noise
        )
        noise = rule.query_noise / len(rows)
        mix = decorrelation(rule.ridge, covariance, noise=noise).to(device)
        network.add_module("mix", mix)
        rows = rows.map_rows(lambda features, labels: (mix(features), labels))
    trainer = Trainer(
        trained_part(network),
        CrossEntropy(tau=rule.temperature),
        target_epsilon=budget.epsilon,
        target_delta=budget.delta,
        batch_size=rule.batch_size,
        steps=rule.steps,
        options=PrivacyOptions(sampling="full_batch" if rule.full_batch else "poisson"),
        training=TrainingOptions(
            optimizer=lambda parameters: LayerAdam(parameters, lr=rule.learning_rate),
            average=rule.average,
            ledger=ledger,
            device=device,
            progress=progress,
        ),
    )
    result = trainer.fit(rows.hand_over())
    if trainer.average is None:
        raise not_set_error("average")
    trainer.average.copy_to(trainer.model)
    return result.steps, trainer.report()
