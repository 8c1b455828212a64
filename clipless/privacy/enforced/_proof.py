"""The proof that a model's examples stay apart, and the plan of what its layers do."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clipless.bounds import (
    Rows,
    compare_passes,
    hooks_of,
    refuse_global_hooks,
    seed_generators,
    trace_rows,
)
from clipless.errors import UnsupportedOperationError
from clipless.privacy.enforced._calls import StandIns
from clipless.privacy.enforced._inputs import InputSpec, call
from clipless.privacy.enforced._passes import PlannedUses, PlanningPass
from clipless.privacy.step._output_guard import main_output

_BATCHES = (5, 3, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
"""Sizes of traced batches: the first two that no axis of the inputs or parameters has."""
_ROUNDING = 1e-3


@dataclass(frozen=True)
class ProvedModel:
    """A model whose examples stay apart: what it is called on, and how it uses its parameters."""

    spec: InputSpec
    planned: PlannedUses
    output_shape: tuple[int, ...]
    operators: int
    """How many operators the batch axis was followed through."""


def prove_rows_apart(model: nn.Module, spec: InputSpec, *, exact: bool | None) -> ProvedModel:
    """Follow the batch axis through a forward pass in training mode, or refuse the model.

    The pass is the one that training will run, with its layers in place, on random inputs in
    batches of two sizes, and a second time in one of them: all must do the same to each example,
    whatever an earlier pass has left in the model. What it computes must be what the model computes
    by itself. (That is compared in evaluation mode, in which nothing is drawn at random.)
    """
    _refuse_hooks(model)
    for problem in batch_norms(model):
        raise UnsupportedOperationError(problem)
    training = [each.training for each in model.modules()]
    if not model.training:
        model.train()
    stand_ins = StandIns(model, exact)
    try:
        with _undisturbed_generators(model):
            small, large = _batch_sizes(model, spec)
            passes: list[PlanningPass] = []
            shapes = [_planned(model, spec, batch, stand_ins, passes)
                      for batch in (large, small, small)]  # fmt: skip
            model.eval()
            _compare(model, spec, small, stand_ins, passes)
    finally:
        for module, before in zip(model.modules(), training, strict=True):
            module.training = before
    first = passes[0]
    for other, shape in zip(passes[1:], shapes[1:], strict=True):
        compare_passes(first.trace.calls, other.trace.calls, (first.batch, other.batch))
        if (first.planned, shapes[0]) != (other.planned, shape):
            raise UnsupportedOperationError(
                "the model uses its parameters otherwise in another pass, or in a batch of another "
                "size. Write its forward such that it does the same in every pass."
            )
    return ProvedModel(spec, first.planned, shapes[0], len(first.trace.calls))


def _planned(
    model: nn.Module, spec: InputSpec, batch: int, stand_ins: StandIns,
    passes: list[PlanningPass],
) -> tuple[int, ...]:  # fmt: skip
    """Trace a pass in training mode, add it to those before it, and return its output's shape."""
    versions = [(name, each, each._version) for name, each in model.named_buffers()]
    planning = PlanningPass(model, batch, earlier=passes)
    output = _run(model, spec, planning, stand_ins)
    written = [name for name, each, version in versions if each._version != version]
    if written:
        raise UnsupportedOperationError(
            f"a forward pass writes to the model's buffers ({', '.join(written)}), such as the "
            "statistics of batch normalisation: what one example leaves there reaches all later "
            "ones. Replace BatchNorm by torch.nn.GroupNorm, or freeze it by calling eval() on "
            "these modules."
        )
    if not isinstance(output, Tensor):
        raise UnsupportedOperationError(
            f"the model returns a {type(output).__name__} without logits. Return one tensor for "
            "the criterion, or an object whose `logits` it is."
        )
    if planning.trace.rows(output) != Rows(0):
        raise UnsupportedOperationError(
            f"the model's output, of shape {tuple(output.shape)}, does not have the examples on "
            "its first axis, one entry for each."
        )
    passes.append(planning)
    return tuple(output.shape[1:])


def _run(model: nn.Module, spec: InputSpec, planning: PlanningPass, stand_ins: StandIns) -> Any:
    """Run the model with its layers in place, followed by the trace of the pass."""
    found: list[Any] = []

    def run() -> Any:
        stand_ins.begin(planning)
        found.append(call(model, spec, inputs))
        return found[0]

    inputs = spec.random(planning.batch, _device(model))
    seed_generators(model)
    random.seed(0)
    np.random.seed(0)
    with stand_ins.installed():
        trace_rows(run, inputs, planning.trace)
    return main_output(found[0])


def _compare(
    model: nn.Module, spec: InputSpec, batch: int, stand_ins: StandIns,
    passes: Sequence[PlanningPass],
) -> None:  # fmt: skip
    """Refuse a model that computes something else with its layers in place than by itself."""
    with torch.no_grad():
        plain = main_output(call(model, spec, spec.random(batch, _device(model))))
    output = _run(model, spec, PlanningPass(model, batch, earlier=passes), stand_ins)
    if not _alike(plain, output):
        raise UnsupportedOperationError(
            "with thresholds the model computes something else than by itself: a layer's forward "
            "is not what its type says, or a parameter is used in a way that is not followed."
        )


def _batch_sizes(model: nn.Module, spec: InputSpec) -> tuple[int, int]:
    taken = {size for shape in spec.shapes for size in shape}
    taken |= {size for each in model.parameters() for size in each.shape}
    free = [size for size in _BATCHES if size not in taken] or list(_BATCHES)
    return free[0], (free[1:] or _BATCHES)[0]


def batch_norms(model: nn.Module) -> list[str]:
    """Return what to say of each batch normalisation that would use the batch's statistics."""
    return [
        f"{path or 'the model'} ({type(module).__name__}): normalisation over the batch mixes "
        "examples: removing one changes all others, so no bound per example exists. Replace it by "
        "torch.nn.GroupNorm, or keep its statistics: call eval() on this module after "
        "model.train()."
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.detach().double(), other.detach().double()
    # Random masks may leave nothing of an example, whose mean over nothing is no number.
    neither = ~(one.isfinite() | other.isfinite())
    one, other = one.masked_fill(neither, 0.0), other.masked_fill(neither, 0.0)
    size = torch.linalg.vector_norm(one) + one.numel() ** 0.5 * 1e-6
    return bool(torch.linalg.vector_norm(one - other) <= _ROUNDING * size)


def _refuse_hooks(model: nn.Module) -> None:
    refuse_global_hooks()
    for path, module in model.named_modules():
        if any(True for _ in module._backward_hooks) or any(
            True for _ in module._backward_pre_hooks
        ):
            raise UnsupportedOperationError(
                f"{path or 'the model'} ({type(module).__name__}) carries a backward hook, which "
                "could change gradients unseen. Remove it."
            )
        if module is model and next(hooks_of(module), None) is not None:
            raise UnsupportedOperationError(
                "the model carries a hook of its own, which would run outside of what is traced. "
                "Put it on a module inside of the model, or remove it."
            )


@contextmanager
def _undisturbed_generators(model: nn.Module) -> Iterator[None]:
    """Leave all generators as they were found."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(model)):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return sorted({each.device for each in model.parameters() if each.is_cuda}, key=str)
