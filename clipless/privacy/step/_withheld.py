"""Placeholders in `grad` between backward pass and step: gradients without noise cannot be read.

Private gradients leave with noise, in the optimizer's step, and are kept back until then. Code that
looks for them in between (`clip_grad_norm_`, a log of norms, another optimizer) would find nothing
and do nothing, in silence. It finds these instead, which say so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clipless.errors import PrivacyError

# What `zero_grad` does and asks. Zeroing what is not there changes nothing.
_NOTHING: frozenset[Any] = frozenset(
    {Tensor.zero_, Tensor.detach_, Tensor.requires_grad_, torch._foreach_zero_}
)
_QUESTIONS: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("grad_fn", "device", "dtype", "layout", "shape", "requires_grad")
)
_IS_SPARSE = Tensor.is_sparse.__get__  # type: ignore[attr-defined]


class WithheldGradient(Tensor):
    """A gradient in name only: it has the shape of one, no entries, and refuses to be used.

    It is sparse, so that it takes no memory, and that autograd, if it has something to add,
    replaces it: that is noticed.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse to take part in any operation."""
        if func in _NOTHING:
            return args[0]
        if func is _IS_SPARSE or func == _IS_SPARSE:  # or optimizers complain of that
            return False
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise PrivacyError(
            f"gradients were to be used ({getattr(func, '__name__', func)}) between backward and "
            "the optimizer's step. They have no noise yet and are kept back until the step, so "
            "that clip_grad_norm_, logs of norms and other optimizers find nothing there. Leave "
            "clipping out: each example's gradient is bounded already (clipless.nn.ClipGradient "
            "and clipless.clip_products lower the bounds). What looks at gradients with their "
            "noise goes into optimizer.register_step_pre_hook, after make_private."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "WithheldGradient()"


def withheld(parameter: Tensor) -> Tensor:
    """Return what stands for the gradient of a parameter that is not handed out yet."""
    empty = torch.sparse_coo_tensor(
        torch.empty(parameter.ndim, 0, dtype=torch.int64, device=parameter.device),
        torch.empty(0, dtype=parameter.dtype, device=parameter.device),
        parameter.shape,
        check_invariants=False,
    )
    return Tensor._make_subclass(WithheldGradient, empty)
