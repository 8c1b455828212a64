"""Saving fitted estimators in one safetensors file: tensors, and a header of JSON."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.errors import DamagedFileError
from clipless.privacy import Plan, PrivacyReport
from clipless.sklearn._base import CliplessEstimator
from clipless.sklearn._network import build_network
from clipless.sklearn._rule import TabularRule

_KINDS = (
    "CliplessClassifier", "CliplessRegressor", "CliplessTextClassifier", "CliplessTextRegressor",
)  # fmt: skip
_FORMAT = "clipless-estimator-5"


def save(estimator: CliplessEstimator, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator to `path`; the file appears whole or not at all."""
    tensors = {f"encoder.{name}": part for name, part in estimator._encoder.to_dict().items()}
    tensors |= {f"network.{name}": part for name, part in estimator.network_.state_dict().items()}
    report = estimator.privacy_
    header = {
        "format": _FORMAT,
        "class": type(estimator).__name__,
        "parameters": {
            "epsilon": estimator.epsilon,
            "delta": estimator.delta,
            "rule": vars(estimator.rule_),
        },
        "inputs": estimator._describe_inputs(),
        "fitted": estimator._fitted_numbers(),
        "n_iter": estimator.n_iter_,
        "privacy": report.to_dict(),
    }
    contiguous = {name: part.contiguous() for name, part in tensors.items()}
    partial = f"{os.fspath(path)}.partial"
    save_file(contiguous, partial, metadata={"clipless": json.dumps(header)})
    os.replace(partial, path)


def load(path: str | os.PathLike[str], *, encoder: Any = None) -> Any:
    """Read an estimator that `save` wrote, ready to predict. Nothing is unpickled or executed.

    `encoder` is that of an estimator for texts, where it is a function, or a folder that is no
    longer where it was.

    Example:
        >>> import tempfile
        >>> from clipless.sklearn import CliplessClassifier
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 3))
        >>> fitted = CliplessClassifier(random_state=0).fit(X, X[:, 0] > 0)
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> fitted.save(path)
        >>> bool((load(path).predict(X) == fitted.predict(X)).all())
        True
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("clipless", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _restored(header, tensors, encoder)
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, RuntimeError, *MALFORMED_ERRORS) as error:
        raise DamagedFileError(
            f"{path} is not a saved estimator, or is damaged: {error_text(error)}. Restore it from "
            "a backup, or fit and save again."
        ) from error


def _restored(header: Any, tensors: dict[str, torch.Tensor], encoder: Any) -> Any:
    """Return the estimator that a header and tensors describe."""
    if header.get("format") != _FORMAT:
        raise ValueError(
            f"it was not written by this version's save: its format is "
            f"{header.get('format')!r}, not {_FORMAT!r}"
        )
    package = importlib.import_module("clipless.sklearn")
    kinds = {name: getattr(package, name) for name in _KINDS}
    if header["class"] not in kinds:
        raise ValueError(f"it holds an unknown kind of estimator, {header['class']!r}")
    parameters = dict(header["parameters"])
    rule = TabularRule(**parameters.pop("rule"))
    estimator = kinds[header["class"]](**parameters)
    estimator.rule_ = rule
    estimator._restore_inputs(header["inputs"], _under(tensors, "encoder."), encoder)
    weights = _under(tensors, "network.")
    outputs = len(weights["3.bias" if rule.hidden else "1.bias"])
    network = build_network(estimator._encoder.features, rule.hidden, outputs)
    network.load_state_dict(weights)
    estimator.network_ = network.eval()
    estimator.n_iter_ = header["n_iter"]
    estimator._restore_numbers(header["fitted"])
    privacy = {name: value for name, value in header["privacy"].items() if name != "caveats"}
    privacy |= {"plan": Plan.from_dict(privacy["plan"]), "notes": tuple(privacy["notes"])}
    for name in ("epsilon", "delta", "steps_taken", "releases"):
        if type(privacy[name]) not in (int, float) or not float(privacy[name]) >= 0:
            raise ValueError(f"its {name} is {privacy[name]!r:.40}")
    estimator.privacy_ = PrivacyReport(**privacy)
    return estimator


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): part for n, part in tensors.items() if n.startswith(prefix)}
