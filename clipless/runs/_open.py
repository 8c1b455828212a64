"""`open_run`: a finished run, rebuilt from its folder and checked."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import sensitivity
from clipless.common import MALFORMED_ERRORS
from clipless.errors import CliplessError
from clipless.folders import RunFile, RunFolder, RunFolderError
from clipless.losses import CrossEntropy, Loss
from clipless.nn import certify
from clipless.privacy import (
    Plan,
    epsilon,
    planned_parameters,
    quantile_thresholds,
    set_quantile_thresholds,
)
from clipless.runs import _build
from clipless.runs._model_kinds import Kind, run_kind
from clipless.runs._tabular import as_arrays, as_trained, criterion_of, encoded
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._sections import RunConfig, stored_config
from clipless.runs.data._digests import check_data
from clipless.runs.data._load import RunData, load_data

_SAME_BOUND = 1e-9


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: configuration, plan, result, and the model with its final weights.

    Guarantee: the weights have the digest that was written down when training ended, lie in
    their constraint sets, and the bounds proved of the rebuilt model are those of the plan.
    """

    folder: Path
    config: RunConfig
    plan: Plan
    result: Mapping[str, Any]
    model: nn.Module = field(repr=False)
    """In evaluation mode, on the CPU. For tables, the network behind the encoding of rows."""
    criterion: Loss
    input_shape: tuple[int, ...]
    """Of what the model receives."""
    estimator: Any = field(default=None, repr=False)
    """The fitted estimator of a run on a table, else None."""

    @property
    def kind(self) -> Kind:
        """How it was trained: a network by name, or by the rule for tables or for images."""
        return run_kind(self.config.model.name)

    @property
    def tabular(self) -> bool:
        """Whether this is a run on a table."""
        return self.kind == "tabular"

    def data(self, *, root: str | None = None, progress: bool | None = None) -> RunData:
        """Read the data of the run again; others than it had are refused."""
        config = self.config.data if root is None else replace(self.config.data, root=root)
        found = load_data(config, progress=progress)
        check_data(RunFolder(self.folder), found)
        return found

    def tensors(self, pair: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """Return examples as the model and the criterion see them."""
        if not self.tabular:
            return pair[0], _build.targets_for(self.config.loss, pair[1])
        return encoded(self.estimator, *map(as_arrays, pair))

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of everything in the ledger, at `delta` or the plan's."""
        history = tuple(RunFolder(self.folder).read_ledger().counts().items())
        chosen = self.plan.delta if delta is None else delta
        return epsilon(history, chosen, accountant=self.plan.accountant)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Rebuild a finished run from its folder.

    Raises:
        RunFolderError: something is missing, was damaged, or does not fit the rest.
    """
    place = RunFolder.open(folder)
    config = stored_config(place)
    if not place.has(RunFile.RESULT):
        raise RunFolderError(
            f"the run in {place.path} has not ended: go on with it by clipless train --resume "
            f"--out {place.path}"
        )
    result = place.read_json(RunFile.RESULT)
    _check_digest(place, result)
    plan = place.read_plan().plan
    try:
        run = _OPENERS[run_kind(config.model.name)](place, config, plan, result)
    except ConfigError as error:
        raise RunFolderError(f"{place.file(RunFile.CONFIG)} was damaged: {error}") from error
    _check_bounds(run)
    return run


def _open_network(
    folder: RunFolder, config: RunConfig, plan: Plan, result: Mapping[str, Any]
) -> Run:
    import safetensors.torch
    from safetensors import SafetensorError

    with torch.random.fork_rng(devices=[]):  # building draws weights that are replaced at once
        model = _build.build_model(config)
    begun = quantile_thresholds(model)
    try:
        weights = safetensors.torch.load(folder.read_weights())
        model.load_state_dict({**_extra(model), **weights})
    except (OSError, RuntimeError, *MALFORMED_ERRORS, SafetensorError) as error:
        raise RunFolderError(
            f"{folder.file(RunFile.WEIGHTS)} does not fit the model of {RunFile.CONFIG}: {error}"
        ) from error
    set_quantile_thresholds(
        model, begun
    )  # the plan is about where they began; they have moved since
    return Run(
        folder=folder.path, config=config, plan=plan, result=result, model=model.eval(),
        criterion=_build.build_loss(config.loss), input_shape=_build.input_shape(config),
    )  # fmt: skip


def _extra(model: nn.Module) -> dict[str, Any]:
    """What a state holds that is no tensor: settings, which the configuration has restored."""
    return {
        key: value for key, value in model.state_dict().items() if not isinstance(value, Tensor)
    }


def _open_tabular(
    folder: RunFolder, config: RunConfig, plan: Plan, result: Mapping[str, Any]
) -> Run:
    from clipless.sklearn import load

    try:
        estimator: Any = load(folder.file(RunFile.WEIGHTS))
    except (OSError, CliplessError, *MALFORMED_ERRORS) as error:
        path = folder.file(RunFile.WEIGHTS)
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    model = as_trained(estimator, {each.name for each in plan.parameters})
    return Run(
        folder=folder.path, config=config, plan=plan, result=result, model=model,
        criterion=criterion_of(estimator), input_shape=(estimator._encoder.features,),
        estimator=estimator,
    )  # fmt: skip


def _open_images(
    folder: RunFolder, config: RunConfig, plan: Plan, result: Mapping[str, Any]
) -> Run:
    from clipless.images import open_images, rule_of

    described = folder.read_json(RunFile.DATA)
    try:
        colours, height, width = described["input_shape"]
        shape = (int(colours), int(height), int(width))
        model = open_images(folder, config, input_shape=shape, classes=described["classes"])
    except (OSError, RuntimeError, *MALFORMED_ERRORS) as error:
        raise RunFolderError(f"the network of {folder.path} cannot be rebuilt: {error}") from error
    temperature = rule_of(config, examples=1).temperature
    return Run(
        folder=folder.path, config=config, plan=plan, result=result, model=model,
        criterion=CrossEntropy(tau=temperature), input_shape=shape,
    )  # fmt: skip


_OPENERS = {"network": _open_network, "tabular": _open_tabular, "scattering": _open_images}


# --- checks --------------------------------------------------------------------------------------


def _check_digest(folder: RunFolder, result: Mapping[str, Any]) -> None:
    path = folder.file(RunFile.WEIGHTS)
    if not path.exists():
        raise RunFolderError(f"{folder.path} has no {RunFile.WEIGHTS}: the final weights are gone")
    if folder.weights_digest() != result.get("weights_sha256"):
        raise RunFolderError(
            f"{path} was changed after training: its digest is not the one in {RunFile.RESULT}. "
            "The guarantee and the certificates are about the weights that training released."
        )


def _check_bounds(run: Run) -> None:
    """The bounds proved of the rebuilt model must be those that the noise was chosen for."""
    try:
        certify(run.model)
        report = sensitivity(run.model, loss=run.criterion, input_shape=run.input_shape)
    except CliplessError as error:
        raise RunFolderError(f"the weights in {run.folder} prove nothing: {error}") from error
    found, planned = planned_parameters(report), run.plan.parameters
    same = len(found) == len(planned) and all(
        (one.name, one.size) == (other.name, other.size)
        and math.isclose(one.gradient_bound, other.gradient_bound, rel_tol=_SAME_BOUND)
        for one, other in zip(found, planned, strict=False)
    )
    if not same:
        raise RunFolderError(
            f"the model rebuilt from {RunFolder(run.folder).file(RunFile.CONFIG)} has other bounds "
            f"than {RunFile.PLAN}: one of the two was changed, or a newer clipless proves other "
            "bounds."
        )
