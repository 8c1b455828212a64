"""Tightness: gradient norms of real examples over their bounds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, default_collate

from clipless.audit.gradients._tightness_result import Tightness, summarise
from clipless.bounds import SensitivityReport, sensitivity, unwrap_module
from clipless.losses import Loss
from clipless.nn import clip_cotangent, clipping_modules, set_loss_scale
from clipless.privacy import arithmetic_slack, guard_room


def tightness(
    model: nn.Module,
    data: Any,
    *,
    loss: Loss,
    examples: int = 256,
    chunk: int = 32,
    seed: int = 0,
) -> Tightness:
    """Compare the gradients of examples with their proved bounds, parameter by parameter.

    For each example drawn, the gradient of its own loss is computed as training would: in the
    precision and mode of training, with cotangents and weight gradients clipped where the model
    clips them, before any division by a batch size. Its norm is divided by the bound from which the
    noise follows. A quotient above one (and the slack for rounding) disproves the bound, and with
    it the guarantee; far below one, noise is wasted on gradients that do not occur, and clipping or
    another norm of the input guard would help.

    What is measured is measured on the data as they are: it is not covered by the privacy guarantee
    (`result.private` is False). So is any choice that rests on it.

    Args:
        model: any model that `clipless.sensitivity` accepts, in training or not; it is copied.
        data: a tuple of inputs and targets, a `Dataset` of such pairs or a `DataLoader` of one.
        examples: how many are drawn at random.
        chunk: how many gradients are held in memory at a time.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0, mode="sphere"), clipless.nn.SpectralLinear(4, 2))
        >>> data = (torch.randn(50, 4), torch.randint(2, (50,)))
        >>> result = tightness(model, data, loss=clipless.losses.CrossEntropy())
        >>> result.examples, result.violations, result["1.weight"].mean > 0.3
        (50, {}, True)
    """
    if examples < 1 or chunk < 1:
        raise ValueError(f"examples and chunk must be at least 1, got {examples} and {chunk}")
    own = _as_in_training(model)
    x, y = _draw(data, examples, seed)
    reference = next(own.parameters())
    x, y = x.to(reference.device), y.to(reference.device)
    with _own_randomness(x.device, seed):
        report = sensitivity(own, loss=loss, input_shape=tuple(x.shape[1:]))
        norms = _gradient_norms(own, loss, report, x, y, chunk=chunk)
    return summarise(
        norms.cpu(),
        bounds=report.gradient_bounds,
        whole=report.global_bound,
        loss=report.loss,
        slack=arithmetic_slack(reference.dtype),
    )


def _as_in_training(model: nn.Module) -> nn.Module:
    """A copy in training mode whose thresholds speak of one example's loss and count nothing."""
    own = copy.deepcopy(unwrap_module(model)).train()
    set_loss_scale(own, 1.0)
    for _, module in clipping_modules(own):
        module.follow = None
    return own


def _draw(data: Any, examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw examples without replacement, with a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(data, tuple | list):
        chosen = torch.randperm(len(data[0]), generator=generator)[:examples]
        pair = [part[chosen] for part in data]
    else:
        source, collate = data, default_collate
        if isinstance(data, DataLoader):
            source, collate = data.dataset, data.collate_fn
        drawn = torch.randperm(len(source), generator=generator)[:examples]
        pair = collate([source[int(index)] for index in drawn])
    if len(pair) != 2 or len(pair[0]) == 0:
        raise ValueError("data must hold pairs of an input and a target, and at least one of them")
    return pair[0], pair[1]


def _gradient_norms(
    model: nn.Module,
    loss: Loss,
    report: SensitivityReport,
    x: Tensor,
    y: Tensor,
    *,
    chunk: int,
) -> Tensor:
    """Norms of one example's gradient, (examples, parameters), in the order of the bounds."""
    names = list(report.gradient_bounds)
    trained = {name: model.get_parameter(name).detach() for name in names}
    rest = {name: p.detach() for name, p in model.named_parameters() if name not in trained}
    rest |= dict(model.named_buffers())
    # The output guard, which clips any other loss.
    limit = report.loss_lipschitz * guard_room(next(model.parameters()).dtype)

    def norms(one: Tensor, target: Tensor) -> Tensor:
        def objective(parameters: dict[str, Tensor]) -> Tensor:
            output = functional_call(model, {**parameters, **rest}, (one[None],))
            return loss.per_example(clip_cotangent(output, limit), target[None])[0]

        gradients = grad(objective)(trained)
        return torch.stack([gradients[name].double().square().sum().sqrt() for name in names])

    found: Tensor = vmap(norms, randomness="different", chunk_size=chunk)(x, y)
    return found.detach()


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Dropout draws here without touching what training will draw."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
