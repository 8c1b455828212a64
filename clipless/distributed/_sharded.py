"""Models sharded by `fully_shard`: how to look at them as if they were whole.

`fully_shard` gives modules another class, hooks, and parameters of which each process has a part.
Bounds are proved for the model underneath; `without_sharding` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import PrivacyError

_STATE_KEYS = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a `DTensor`, told without importing what defines it."""
    return hasattr(type(tensor), "placements")


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's parameters are sharded over processes."""
    return any(map(is_dtensor, model.parameters()))


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds: all of it, for ordinary ones."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [module for module in model.modules() if _was_sharded(module)]


def _was_sharded(module: nn.Module) -> bool:
    """Told by what sharded modules have in all releases of torch; other names come and go."""
    return hasattr(type(module), "_get_fsdp_state")


def reshard(model: nn.Module) -> None:
    """Let go of whole copies of parameters, which a forward pass may have left behind."""
    for module in sharded_modules(model):
        module.reshard()


def check_sharding(model: nn.Module, *, size: int) -> None:
    """Refuse sharding that noise, sums and projection are not made for."""
    for name, parameter in model.named_parameters():
        placements: Any = getattr(parameter, "placements", None)
        if placements is None:
            if parameter.requires_grad:
                raise PrivacyError(
                    f"{name} is not sharded while others are: its gradient would not be summed. "
                    "Call fully_shard on the whole model, without ignored_params."
                )
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != size or not placements[0].is_shard(dim=0):
            raise PrivacyError(
                f"{name} is placed as {placements} on a mesh of shape {tuple(mesh.shape)}. Noise "
                "is drawn once for every entry only if each lies in one process: shard along the "
                "first axis, over one mesh of all processes."
            )
    for module in sharded_modules(model):
        policy = module._get_fsdp_state()._mp_policy
        if any((policy.param_dtype, policy.reduce_dtype, policy.output_dtype)):
            raise PrivacyError(
                "fully_shard was given a mixed precision policy, whose rounding the slack in the "
                "sensitivities does not cover. Leave mp_policy out."
            )
        if not hasattr(module, "set_force_sum_reduction_for_comms"):
            raise PrivacyError("sharded parameters need torch 2.9 or newer")


def sum_gradients(model: nn.Module) -> None:
    """Let the gradients of all processes be summed, where the default is their mean."""
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def check_summed(model: nn.Module) -> None:
    """Refuse a model whose gradients somebody has set back to be averaged."""
    for module in sharded_modules(model):
        for group in _groups_of(module):
            if group.gradient_divide_factor != 1.0 or not group.reduce_grads:
                raise PrivacyError(
                    "the sharded model was told to divide its gradients, or not to reduce them. "
                    "Private training sums them: leave set_gradient_divide_factor and "
                    "set_requires_gradient_sync alone."
                )


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    only = state._fsdp_param_group  # there was one at most before torch 2.12
    return [] if only is None else [only]


@contextmanager
def without_sharding(model: nn.Module) -> Iterator[None]:
    """Show the modules as they were before `fully_shard`, with the parameters as they are.

    Does nothing to a model that is not sharded.
    """
    if not is_sharded(model):
        yield
        return
    reshard(model)
    kept = [_remove_sharding(module) for module in model.modules()]
    try:
        yield
    finally:
        for module, kind, attributes, tables in kept:
            module.__class__ = kind
            vars(module).update(attributes)
            for table, items in tables:
                table.clear()
                table.update(items)


def _remove_sharding(module: nn.Module) -> tuple[nn.Module, type, dict[str, Any], list[Any]]:
    kind = type(module)
    if _was_sharded(module):
        module.__class__ = kind.__bases__[1]
    names = [name for name in vars(module) if name.startswith(_STATE_KEYS)]
    attributes = {name: vars(module).pop(name) for name in names}
    tables = []
    for table in (module._forward_hooks, module._forward_pre_hooks):
        tables.append((table, list(table.items())))
        for key, hook in list(table.items()):
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
                del table[key]
    return module, kind, attributes, tables


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """Show the model as it was before `fully_shard`, with whole parameters: copies, to be read.

    All processes must do so together.
    """
    with without_sharding(model):
        places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and is_dtensor(parameter)
        ]
        copies: dict[int, nn.Parameter] = {}
        for module, name, parameter in places:
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(
                    full_tensor(parameter.detach()), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = copies[id(parameter)]
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter


def rows_of(length: int, size: int) -> list[int]:
    """How many rows of a sharded tensor each process holds.

    Example:
        >>> rows_of(10, 4)
        [3, 3, 3, 1]
    """
    chunk = -(-length // size)
    return [max(0, min(chunk, length - rank * chunk)) for rank in range(size)]


def full_tensor(tensor: Any) -> Any:
    """The whole of a sharded tensor, in all processes; anything else as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_rows(value: Tensor, of: Any) -> Tensor:
    """The part of a whole `value` that this process holds of the sharded tensor `of`."""
    if not is_dtensor(of) or is_dtensor(value):
        return value
    rows = rows_of(of.shape[0], of.device_mesh.size())
    rank = of.device_mesh.get_local_rank()
    return value.narrow(0, sum(rows[:rank]), rows[rank])


@torch.no_grad()
def write(tensors: Sequence[Any], values: Sequence[Any]) -> None:
    """Copy whole or sharded values into tensors that are either."""
    if tensors:
        parts = [local(local_rows(v, t)) for t, v in zip(tensors, values, strict=True)]
        torch._foreach_copy_([local(tensor) for tensor in tensors], parts)


def full_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model, sharded or not, as it would be in one process."""
    reshard(model)
    return {name: full_tensor(value) for name, value in model.state_dict().items()}


def load_full_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `full_state` returned, into a model that is sharded or not."""
    if not is_sharded(model):
        model.load_state_dict(state)
        return
    reshard(model)
    own = {
        name: like(value, local_rows(state[name], value)) if is_dtensor(value)
        else state[name]
        for name, value in model.state_dict().items()
    }  # fmt: skip
    model.load_state_dict(own)


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with all sharded tensors gathered, in all processes."""
    saved = optimizer.state_dict()
    states = {
        number: {key: full_tensor(value) for key, value in state.items()}
        for number, state in saved["state"].items()
    }
    return {**saved, "state": states}


def load_full_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `full_optimizer_state` returned, each process its part."""
    optimizer.load_state_dict(state)
    for parameter, own in optimizer.state.items():
        for key, value in own.items():
            sharded = is_dtensor(parameter) and isinstance(value, Tensor)
            if sharded and value.shape == parameter.shape and parameter.ndim:
                own[key] = like(parameter, local_rows(value, parameter).clone())


def like(tensor: Any, part: Tensor) -> Any:
    """A sharded tensor like `tensor`, of which this process holds `part`."""
    from torch.distributed.tensor import DTensor

    if is_dtensor(part):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=torch.empty(tensor.shape, device="meta").stride(),
    )  # fmt: skip
