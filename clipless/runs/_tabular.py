"""Runs on tables: the estimators of `clipless.sklearn`, which choose everything by a rule."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from clipless.bounds import clip_products
from clipless.common import not_set_error
from clipless.data import LargeTable
from clipless.errors import CliplessError
from clipless.folders import RunFile, RunFolder
from clipless.losses import Loss
from clipless.privacy import default_delta
from clipless.runs._model_kinds import TABULAR
from clipless.runs._result import TrainedRun
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._fields import as_type, refuse_unknown
from clipless.runs.config._sections import Choice, RunConfig
from clipless.runs.data._load import RunData

if TYPE_CHECKING:
    from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule


def resolved_tabular(config: RunConfig, data: RunData) -> RunConfig:
    """Return the configuration with the rule's choices as the settings of the model.

    The rule reads public numbers alone: rows, columns, epsilon. Settings of the model replace its
    choices.
    """
    from clipless.sklearn import TabularRule

    if config.privacy.epsilon is None:
        raise not_set_error("epsilon")
    if data.kind == "images":
        raise ConfigError("the model tabular is for tables; name another one for images")
    numbers: dict[str, Any] = {"rows": data.size, "epsilon": config.privacy.epsilon}
    if config.data.text is not None:
        rule = TabularRule.choose_for_vectors(**numbers)
    else:
        columns = data.input_shape[0] + (config.data.task == "regression")
        rule = TabularRule.choose(columns=columns, **numbers)
    kinds = get_type_hints(TabularRule)
    given = config.model.settings
    refuse_unknown(given, kinds, where="[model] tabular")
    settings = asdict(rule) | {
        key: as_type(value, kinds[key], where=f"model.{key}") for key, value in given.items()
    }
    return replace(
        config,
        model=Choice(name=TABULAR, settings=settings),
        privacy=replace(config.privacy, delta=config.privacy.delta or default_delta(data.size)),
        training=replace(config.training, device=config.training.device or "cpu"),
    )


def train_tabular(
    config: RunConfig, data: RunData, folder: RunFolder, *, resume: bool, progress: bool | None
) -> TrainedRun:
    """Fit the estimator in the folder, or go on with a fit that was broken off."""
    from clipless.sklearn import TabularRule

    if resume and folder.has(RunFile.WEIGHTS):
        raise ConfigError(f"the run in {folder.path} is done: there is nothing to go on with")
    begun = time.monotonic()
    estimator = make_estimator(
        config,
        classes=data.labels,
        rule=TabularRule(**config.model.settings),
        run_dir=folder.path,
        progress=sys.stderr.isatty() if progress is None else progress,
    )
    features, target = (as_arrays(part) for part in data.train)
    try:
        estimator.fit(features, target, users=data.users)
    except CliplessError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    seconds = time.monotonic() - begun
    report = estimator.privacy_
    return TrainedRun(
        folder=folder.path,
        epsilon=report.epsilon,
        delta=report.delta,
        steps=estimator.n_iter_,
        stopped="finished",
        seconds=seconds,
        metrics=measure(estimator, *(as_arrays(part) for part in data.test)),
        averaged=True,
        weights_sha256=folder.weights_digest(),
        resumed_from=None,
        report=None,
    )


def make_estimator(
    config: RunConfig, *, classes: Any, rule: TabularRule, run_dir: Path, progress: bool
) -> CliplessClassifier | CliplessRegressor:
    """Return the estimator of a resolved configuration, to be fitted."""
    from clipless.sklearn import (
        CliplessClassifier,
        CliplessRegressor,
        CliplessTextClassifier,
        CliplessTextRegressor,
    )

    if config.privacy.epsilon is None:
        raise not_set_error("epsilon")
    options: dict[str, Any] = {
        "epsilon": config.privacy.epsilon,
        "delta": config.privacy.delta,
        "rule": rule,
        "run_dir": run_dir,
        "random_state": config.training.seed,
        "device": config.training.device,
        "progress": progress,
    }
    regression = config.data.task == "regression"
    if config.data.text is not None:
        options["encoder"] = config.data.encoder
        if regression:
            return CliplessTextRegressor(**options)
        return CliplessTextClassifier(classes=classes, **options)
    if regression:
        return CliplessRegressor(**options)
    return CliplessClassifier(classes=classes, **options)


def measure(estimator: Any, features: Any, target: Any) -> dict[str, float]:
    """Return what the estimator reaches on rows that are not private."""
    from sklearn import metrics

    predicted = estimator.predict(features)
    if not hasattr(estimator, "classes_"):
        target, predicted = _with_numbers(target, predicted)
        return {
            "r2": float(metrics.r2_score(target, predicted)),
            "root_mean_squared_error": float(metrics.root_mean_squared_error(target, predicted)),
        }
    found = {"accuracy": float(estimator.score(features, target))}
    known, places = class_places(estimator, target)
    if len(estimator.classes_) == 2 and len(set(places[known])) == 2:
        scores = estimator.decision_function(features)[known]
        found["auroc"] = float(metrics.roc_auc_score(places[known] == 1, scores))
    return found


def class_places(estimator: Any, target: Any) -> tuple[Any, Any]:
    """Return for each label whether it is a class of a fitted estimator, and which."""
    from clipless.sklearn import read_labels

    names = [cell.name for cell in read_labels(list(estimator.classes_)).cells]
    labels = read_labels(as_arrays(target))
    places = np.array([names.index(c.name) if c.name in names else -1 for c in labels.cells])
    return places[labels.positions] >= 0, places[labels.positions]


def _with_numbers(target: Any, predicted: Any) -> tuple[Any, Any]:
    """The rows that have a number as their target."""
    from clipless.sklearn import read_labels

    labels = read_labels(target)
    numbers = np.array([cell.number for cell in labels.cells])[labels.positions]
    known = np.isfinite(numbers)
    return numbers[known], predicted[known]


def as_arrays(part: Any) -> Any:
    """Return tensors as arrays; tables stay what they are."""
    return part.numpy() if hasattr(part, "numpy") else part


def criterion_of(estimator: Any) -> Loss:
    """Return the loss that a fitted estimator was trained with."""
    loss: Loss = estimator._criterion(estimator.rule_)
    return loss


def as_trained(estimator: Any, trained: Collection[str]) -> nn.Module:
    """Return the network of a loaded estimator as it was in training, for its bounds.

    `trained` names the parameters that were trained; the others are frozen again.
    """
    network: nn.Module = estimator.network_.eval()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    fraction = estimator.rule_.product_clip
    if fraction is not None:
        clip_products(
            network,
            fraction=fraction,
            loss=criterion_of(estimator),
            input_shape=(estimator._encoder.features,),
        )
    return network


def encoded(estimator: Any, features: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return rows and targets of a table as the network of a fitted estimator sees them.

    Rows without a target, or of labels that are no class, are left out: training saw none of them.
    """
    if isinstance(features, LargeTable):
        raise ConfigError(
            "the training rows of a table that is read in pieces are not held in memory: measure "
            "on its test rows, or on a smaller file"
        )
    numbers, codes, _ = estimator._read(features, reset=False)
    inputs = estimator._encoder(numbers, codes)
    if not hasattr(estimator, "classes_"):
        values, rows = map(torch.from_numpy, _with_numbers(target, np.arange(len(inputs))))
        return inputs[rows], estimator._target(values)
    known, places = class_places(estimator, target)
    return inputs[torch.from_numpy(known)], estimator._target(torch.from_numpy(places[known]))
