"""Tensors that all examples share, such as embeddings of positions: one copy for each example.

A parameter that is added to all examples, or the embedding of positions, has one value and a
gradient from each example, which autograd adds up before anybody can look. So while a private pass
runs, such a tensor has a copy for every example, and stays one tensor to whoever works with it:
operations on it alone work on each copy, and where it meets the batch, each copy meets its example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from clipless.privacy.enforced._passes import LayerPass

_ENTRY_BY_ENTRY = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "maximum", "minimum", "where", "addcmul",
    "lerp", "pow", "subtract", "multiply", "divide", "truediv", "radd", "rmul", "rtruediv", "iadd",
    "imul", "isub", "itruediv", "gt", "lt", "ge", "le", "eq", "ne", "rpow", "atan2", "logaddexp",
}  # fmt: skip
_JOINING = {"cat", "concat", "concatenate", "stack"}
_PRODUCTS = {"matmul", "linear"}
_ALONG_NEW_AXES = {"expand", "repeat", "expand_as", "broadcast_to", "tile"}


class Shared(Tensor):
    """A tensor that is the same for all examples, with a copy for each, (rows, *shape)."""

    copies: Tensor
    owner: LayerPass

    @staticmethod
    def __new__(cls, copies: Tensor, owner: LayerPass) -> Shared:
        """Look like one copy."""
        shape = copies.shape[1:]
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=copies.dtype, device=copies.device, requires_grad=False
        )
        made.copies, made.owner = copies, owner
        return made

    def __init__(self, copies: Tensor, owner: LayerPass) -> None:
        pass

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return f"Shared(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Work on the copies."""
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "size", "dim", "numel", "__len__", "is_floating_point", "__repr__",
                    "is_complex", "ndimension", "stride", "is_contiguous", "get_device",
                    "__format__", "__bool__", "__hash__"):  # fmt: skip
            described = function.__self__.__name__ if name == "__get__" else name
            if described in ("data", "grad", "T", "mT", "__bool__", "grad_fn"):
                if described in ("T", "mT"):
                    return _one_by_one(lambda x: x.mT, args, {})
                raise _refused(described)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        plain = name.strip("_")
        if name.endswith("_") and not name.startswith("__"):
            plain = name[:-1]
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return _apply(plain, function, args, kwargs)
        except UnsupportedOperationError as error:
            for each in _tensors((*args, *kwargs.values())):
                if isinstance(each, Shared):
                    each.owner.refused(error)
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what did not come by `__torch_function__`."""
        raise _refused(str(function))


def _apply(name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = list(_tensors((*args, *kwargs.values())))
    owner = next(each for each in given if isinstance(each, Shared)).owner
    others = [each for each in given if not isinstance(each, Shared)]
    if name in _ALONG_NEW_AXES:
        found = _over_the_batch(owner, function, args, kwargs)
        if found is not None:
            return found
    batched = [each for each in others if owner.is_batched(name, each)]
    if not batched:
        return _one_by_one(function, args, kwargs)
    if name in _PRODUCTS or name == "embedding":
        return _product(owner, name, args, kwargs)
    if name in _ENTRY_BY_ENTRY:
        ndim = max(each.ndim for each in given)
        axis = owner.batch_axis(name, batched, ndim)
        args, kwargs = _replaced(args, kwargs, lambda each: _aligned(each, axis, ndim))
        return function(*args, **kwargs)
    if name in _JOINING:
        ndim = given[0].ndim
        axis = owner.batch_axis(name, batched, ndim)
        args, kwargs = _replaced(args, kwargs, lambda each: _aligned(each, axis, ndim))
        return function(*args, **kwargs)
    raise _refused(name)


def _refused(name: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{name}: a trainable parameter that stands by itself (torch.nn.Parameter), or what was "
        "computed from it or from positions alone, is used with the batch in a way whose gradient "
        "is not bounded example by example. Add, multiply, expand or join it with the batch, use "
        "it in F.linear, put it into a layer such as torch.nn.Linear, or freeze it "
        "(requires_grad_(False))."
    )


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _replaced(
    args: Any, kwargs: dict[str, Any], change: Callable[[Shared], Tensor]
) -> tuple[Any, dict[str, Any]]:
    def each(value: Any) -> Any:
        if isinstance(value, Shared):
            return change(value)
        if isinstance(value, list | tuple):
            return type(value)(map(each, value))
        return value

    return tuple(map(each, args)), {key: each(value) for key, value in kwargs.items()}


def _one_by_one(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply a function to each copy."""
    shared = [each for each in _tensors((*args, *kwargs.values())) if isinstance(each, Shared)]
    owner = shared[0].owner

    def one(*copies: Tensor) -> Any:
        left = iter(copies)
        own_args, own_kwargs = _replaced(args, kwargs, lambda _: next(left))
        return function(*own_args, **own_kwargs)

    found = torch.vmap(one)(*(each.copies for each in shared))
    if isinstance(found, list | tuple):
        return type(found)(Shared(each, owner) for each in found)
    return Shared(found, owner)


def _aligned(shared: Shared, axis: int, ndim: int) -> Tensor:
    """Lay the copies such that they broadcast to a batch whose examples are on this axis."""
    copies, missing = shared.copies, ndim - shared.ndim
    own = axis - missing
    if own < 0:  # none of its axes is that of the examples
        lead = copies.shape[0], *[1] * (missing - 1), *shared.shape
        return copies.reshape(lead).movedim(0, axis)
    if shared.shape[own] != 1:
        raise _refused("an axis of its own against the batch axis")
    return copies.squeeze(own + 1).movedim(0, own)


def _over_the_batch(
    owner: LayerPass, function: Any, args: Any, kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the copies themselves for `expand(batch, -1, -1)` and the like."""
    shared: Shared = args[0]
    meta = torch.empty(shared.shape, device="meta")
    wanted = function(meta, *args[1:], **kwargs).shape
    missing = len(wanted) - shared.ndim
    axis = owner.batch_among(wanted, shared.shape, missing)
    if axis is None:
        return None
    laid = _aligned(shared, axis, len(wanted))
    expanded = [size if place != axis else -1 for place, size in enumerate(wanted)]
    if function.__name__ in ("repeat", "tile"):
        times = [w // h for w, h in zip(wanted, laid.shape, strict=True)]
        return laid.repeat(times)
    return laid.expand(expanded)


def _product(owner: LayerPass, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Products of the batch with a parameter, each example with its own copy."""
    x, weight = args[0], args[1]
    if not isinstance(weight, Shared) or isinstance(x, Shared) or name == "embedding":
        raise _refused(name)
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    if owner.batch_axis(name, [x], x.ndim) != 0 or x.ndim < 2 or weight.ndim != 2:
        raise _refused(name)
    matrices = weight.copies.mT if name == "linear" else weight.copies
    positions = x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)
    found = (positions @ matrices).reshape(*x.shape[:-1], matrices.shape[-1])
    if bias is None:
        return found
    if isinstance(bias, Shared):
        bias = _aligned(bias, 0, found.ndim)
    return found + bias
