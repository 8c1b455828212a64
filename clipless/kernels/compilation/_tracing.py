"""Detection of compilers, tracers and function transforms, and the lock of symbolic tracing.

Layers with hand-written backward passes use them where autograd is alone. Everybody else is given
ordinary torch operators of the same values and derivatives, which can be traced, fused and mapped.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

TRACING_LOCK = threading.RLock()
"""The lock of everybody who traces a model or enters compiled code: one thread at a time.

Symbolic tracing patches torch's modules for the whole process, and compiled functions refuse to run
meanwhile.
"""


def needs_plain_operators(x: Tensor) -> bool:
    """Return whether what is computed from `x` must consist of ordinary torch operators.

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
    """Return whether torch.compile traces this, without a function transform around it.

    Programs that are exported, by others than `torch.compile`, are to consist of torch's operators.

    Example:
        >>> is_compiling()
        False
    """
    return torch.compiler.is_dynamo_compiling() and not torch._C._are_functorch_transforms_active()
