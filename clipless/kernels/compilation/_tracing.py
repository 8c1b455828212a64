"""Who looks at the operators: autograd alone, or a compiler, a tracer or a function transform?

Layers with hand-written backward passes use them where autograd is alone. Everybody else is given
ordinary torch operators of the same values and derivatives, which can be traced, fused and mapped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def needs_plain_operators(x: Tensor) -> bool:
    """Whether what is computed from `x` must consist of ordinary torch operators.

    Example:
        >>> needs_plain_operators(torch.ones(3))
        False
    """
    if torch.compiler.is_compiling():  # asked first: a compiler stops at the questions below
        return True
    return (
        type(x) not in (Tensor, nn.Parameter)  # symbolic tracing, and tensors of other kinds
        or not x.is_floating_point()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(x)  # batches of cotangents
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def is_compiling() -> bool:
    """Whether a compiler looks, and no function transform: it understands hand-written backwards.

    Programs that are exported, by others than `torch.compile`, are to consist of torch's operators.

    Example:
        >>> is_compiling()
        False
    """
    return torch.compiler.is_dynamo_compiling() and not torch._C._are_functorch_transforms_active()
