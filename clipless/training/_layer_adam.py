"""Adam with one second moment for each parameter tensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from clipless.distributed import full_tensor

_SCALARS = ("step", "second_moment")


class LayerAdam(torch.optim.Optimizer):
    """Adam whose second moment is one number for each parameter tensor.

    Noise of a private gradient has the same variance in all entries of a tensor. Adam's second
    moment of one entry is then mostly an estimate of that known number, and dividing by the
    estimates amplifies the noise where they happen to be small. One moment for the whole tensor
    (a layer's weight, or its bias) keeps what Adam is good for, a step whose length does not
    depend on the scale of the layer's gradients, and leaves the direction within the layer alone:
    the update turns with the gradient if the entries of a tensor are rotated.

    With g the gradient of a tensor of n entries, at its step t:

        m <- beta1 m + (1 - beta1) g            (the tensor's shape)
        v <- beta2 v + (1 - beta2) ||g||^2 / n  (one number)
        w <- (1 - lr weight_decay) w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    It reads nothing but the gradients it is given. If they are private, so is what it makes of
    them, at no further cost. Nothing is read back from the device, step counts included.

    Args:
        params: parameters, or groups of them with options of their own, as for any optimizer.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, as in AdamW.
        maximize: climb instead of descending.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = LayerAdam([weight], lr=0.1)
        >>> weight.grad = torch.tensor([3.0, 4.0])  # its root mean square is 5 / sqrt(2)
        >>> optimizer.step()
        >>> weight.detach() * 5 / 2**0.5
        tensor([-0.3000, -0.4000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.005,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose options default to those of the constructor."""
        super().add_param_group(param_group)
        try:
            _validate(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes gradients anew and returns the loss. (A private run refuses it.)

        Returns:
            What the closure returned, or `None` without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _with_gradients(group["params"]):
                self._update(group, parameters)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a copy of a saved state. Training goes on exactly as it would have."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        states = [state_dict["state"].get(number) for number in saved]
        if any(state and not {*_SCALARS, "first_moment"} <= set(state) for state in states):
            raise ValueError("the saved state is that of another optimizer than LayerAdam")
        super().load_state_dict(copy.deepcopy(state_dict))
        # The base class rounds moments to the parameter's dtype and leaves counts on the device
        # they were saved on.
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, state in zip(parameters, states, strict=True):
            for key in _SCALARS if state else ():
                self.state[parameter][key] = _scalar(parameter).copy_(state[key])

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [self._state_of(parameter) for parameter in parameters]
        steps, first, second = (
            [state[key] for state in states] for key in ("step", "first_moment", "second_moment")
        )
        lr, (beta1, beta2) = group["lr"], group["betas"]

        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        norms = torch._foreach_norm(gradients, dtype=second[0].dtype)
        squares = [full_tensor(norm) for norm in norms]  # of all parts, where gradients are sharded
        torch._foreach_mul_(squares, squares)
        torch._foreach_div_(squares, [float(max(p.numel(), 1)) for p in parameters])
        torch._foreach_lerp_(second, squares, 1 - beta2)

        # The factor of the first moment, one number for each tensor.
        factors = torch._foreach_div(second, _bias_corrections(beta2, steps))
        torch._foreach_sqrt_(factors)
        torch._foreach_add_(factors, group["eps"])
        torch._foreach_mul_(factors, _bias_corrections(beta1, steps))
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, lr if group["maximize"] else -lr)

        if group["weight_decay"] != 0:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_addcmul_(parameters, first, factors)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = _scalar(parameter)
            state["first_moment"] = torch.zeros_like(parameter)
            state["second_moment"] = _scalar(parameter)
        return state


def _scalar(parameter: Tensor) -> Tensor:
    """A zero beside the parameter, in float32 at least: half precisions could not count."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros((), dtype=dtype, device=parameter.device)


def _bias_corrections(beta: float, steps: list[Tensor]) -> tuple[Tensor, ...]:
    """Return `1 - beta^t` for every count, without the cancellation for small t."""
    powers = torch._foreach_mul(steps, math.log(beta) if beta > 0 else -math.inf)
    torch._foreach_expm1_(powers)
    torch._foreach_neg_(powers)
    return powers


def _with_gradients(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Collect the parameters that have a gradient, one list for each dtype."""
    lists: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            raise RuntimeError(
                f"LayerAdam was given a sparse gradient, of shape {tuple(parameter.shape)}. Noise "
                "fills every entry, so private gradients are dense: use sparse=False."
            )
        lists.setdefault(parameter.dtype, []).append(parameter)
    return list(lists.values())


def _validate(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise ValueError(
                f"LayerAdam needs real floating-point parameters, got one of {parameter.dtype}. "
                "Write complex weights as pairs of real ones (torch.view_as_real)."
            )
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr must have one element, got shape {tuple(group['lr'].shape)}")
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {group[name]}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
