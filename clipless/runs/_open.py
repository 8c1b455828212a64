"""A finished run, rebuilt from its folder and checked against what the folder says of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import sensitivity
from clipless.common._malformed import MALFORMED, reason
from clipless.errors import CliplessError
from clipless.ledger import read_ledger
from clipless.losses import CrossEntropy, Loss
from clipless.nn import certify
from clipless.privacy import Plan, epsilon
from clipless.privacy._following import set_thresholds, thresholds
from clipless.privacy._plan import planned_parameters
from clipless.runs import _folder, _parts
from clipless.runs._config import RunConfig
from clipless.runs._data import RunData, load_data
from clipless.runs._digests import check_data
from clipless.runs._errors import ConfigError, RunFolderError
from clipless.runs._kinds import Kind, kind_of
from clipless.runs._tabular import as_table, as_trained, criterion_of, encoded

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
        return kind_of(self.config.model.name)

    @property
    def tabular(self) -> bool:
        """Whether this is a run on a table."""
        return self.kind == "tabular"

    def data(self, *, root: str | None = None, progress: bool | None = None) -> RunData:
        """Read the data of the run again; others than it had are refused."""
        config = self.config.data if root is None else replace(self.config.data, root=root)
        found = load_data(config, progress=progress)
        check_data(self.folder, found)
        return found

    def tensors(self, pair: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """Return examples as the model and the criterion see them."""
        if not self.tabular:
            return pair[0], _parts.targets_for(self.config.loss, pair[1])
        return encoded(self.estimator, *map(as_table, pair))

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of everything in the ledger, at `delta` or the plan's."""
        history = tuple(read_ledger(self.folder / _folder.LEDGER).counts().items())
        chosen = self.plan.delta if delta is None else delta
        return epsilon(history, chosen, accountant=self.plan.accountant)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Rebuild a finished run from its folder.

    Raises:
        RunFolderError: something is missing, was damaged, or does not fit the rest.
    """
    place = Path(folder)
    if not place.is_dir():
        raise RunFolderError(f"there is no folder {place}")
    config = _folder.stored_config(place)
    if not (place / _folder.RESULT).exists():
        raise RunFolderError(
            f"the run in {place} has not ended: go on with it by clipless train --resume --out "
            f"{place}"
        )
    result = _folder.read_json(place, _folder.RESULT, kind="result")
    _check_digest(place, result)
    plan = read_plan(place)
    try:
        run = _OPENERS[kind_of(config.model.name)](place, config, plan, result)
    except ConfigError as error:
        raise RunFolderError(f"{place / _folder.CONFIG} was damaged: {error}") from error
    _check_bounds(run)
    return run


def _open_network(folder: Path, config: RunConfig, plan: Plan, result: Mapping[str, Any]) -> Run:
    import safetensors.torch
    from safetensors import SafetensorError

    with torch.random.fork_rng(devices=[]):  # building draws weights that are replaced at once
        model = _parts.build_model(config)
    begun = thresholds(model)
    try:
        weights = safetensors.torch.load((folder / _folder.WEIGHTS).read_bytes())
        model.load_state_dict({**_extra(model), **weights})
    except (OSError, RuntimeError, *MALFORMED, SafetensorError) as error:
        raise RunFolderError(
            f"{folder / _folder.WEIGHTS} does not fit the model of {_folder.CONFIG}: {error}"
        ) from error
    set_thresholds(model, begun)  # the plan is about where they began; they have moved since
    return Run(
        folder=folder, config=config, plan=plan, result=result, model=model.eval(),
        criterion=_parts.build_loss(config.loss), input_shape=_parts.input_shape(config),
    )  # fmt: skip


def _extra(model: nn.Module) -> dict[str, Any]:
    """What a state holds that is no tensor: settings, which the configuration has restored."""
    return {
        key: value for key, value in model.state_dict().items() if not isinstance(value, Tensor)
    }


def _open_tabular(folder: Path, config: RunConfig, plan: Plan, result: Mapping[str, Any]) -> Run:
    from clipless.sklearn import load

    try:
        estimator: Any = load(folder / _folder.WEIGHTS)
    except (OSError, CliplessError, *MALFORMED) as error:
        raise RunFolderError(f"{folder / _folder.WEIGHTS} cannot be read: {error}") from error
    model = as_trained(estimator, {each.name for each in plan.parameters})
    return Run(
        folder=folder, config=config, plan=plan, result=result, model=model,
        criterion=criterion_of(estimator), input_shape=(estimator._encoder.features,),
        estimator=estimator,
    )  # fmt: skip


def _open_images(folder: Path, config: RunConfig, plan: Plan, result: Mapping[str, Any]) -> Run:
    from clipless.images._recipes import rule_of
    from clipless.images._run import open_images

    described = _folder.read_json(folder, _folder.DATA, kind="data")
    try:
        colours, height, width = described["input_shape"]
        shape = (int(colours), int(height), int(width))
        model = open_images(folder, config, input_shape=shape, classes=described["classes"])
    except (OSError, RuntimeError, *MALFORMED) as error:
        raise RunFolderError(f"the network of {folder} cannot be rebuilt: {error}") from error
    temperature = rule_of(config, examples=1).temperature
    return Run(
        folder=folder, config=config, plan=plan, result=result, model=model,
        criterion=CrossEntropy(tau=temperature), input_shape=shape,
    )  # fmt: skip


_OPENERS = {"network": _open_network, "tabular": _open_tabular, "scattering": _open_images}


# --- checks --------------------------------------------------------------------------------------


def _check_digest(folder: Path, result: Mapping[str, Any]) -> None:
    path = folder / _folder.WEIGHTS
    if not path.exists():
        raise RunFolderError(f"{folder} has no {_folder.WEIGHTS}: the final weights are gone")
    if _folder.file_digest(path) != result.get("weights_sha256"):
        raise RunFolderError(
            f"{path} was changed after training: its digest is not the one in {_folder.RESULT}. "
            "The guarantee and the certificates are about the weights that training released."
        )


def read_plan(folder: Path) -> Plan:
    """Return the plan in a run folder."""
    path = folder / _folder.PLAN
    try:
        return Plan.from_dict(json.loads(path.read_bytes())["plan"])
    except (OSError, *MALFORMED) as error:
        raise RunFolderError(f"{path} cannot be read: {reason(error)}") from error


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
            f"the model rebuilt from {run.folder / _folder.CONFIG} has other bounds than "
            f"{_folder.PLAN}: one of the two was changed, or a newer clipless proves other bounds."
        )
