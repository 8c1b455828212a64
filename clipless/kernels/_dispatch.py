"""Which implementation computes an operator: a hand-written kernel, autograd's or a traceable one.

Layers with hand-written backward passes use them where autograd alone looks at the operators.
Compilers, tracers and function transforms are given ordinary torch operators of the same values and
derivatives, which can be traced, fused and mapped.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

TRACING_LOCK = threading.RLock()
"""The lock of everybody who traces a model or enters compiled code: one thread at a time.

Symbolic tracing patches torch's modules for the whole process, and compiled functions refuse to run
meanwhile.
"""
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return the module of GPU kernels if it can work on `x`; otherwise torch's operators do."""
    if x.device.type != "cuda" or x.dtype not in _DTYPES:
        return None
    return _load()


@functools.cache
def _load() -> ModuleType | None:
    """Import the kernels and try one, so that nothing is left to fail in the middle of a run."""
    try:
        importlib.import_module("triton")
        kernels = importlib.import_module("clipless.kernels._triton")
        for first in (2.0, 3.0):  # the second launch takes a shorter way
            x = torch.tensor([[first, 1.0]], device="cuda")
            kernels.sort_pairs(x, y := torch.empty_like(x), None, 1, False)
            if y.tolist() != [[1.0, first]]:
                raise RuntimeError("a kernel computed something else than it should")
    except Exception as error:  # no Triton, no compiler, an old GPU: all are good reasons
        warnings.warn(
            f"GPU kernels are not available ({error}); slower operators of torch are used.",
            stacklevel=2,
        )
        return None
    return kernels


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
        or torch._C._len_torch_dispatch_stack() > 0  # somebody follows operators one by one
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


def dense(x: Tensor) -> Tensor:
    """Return `x` without gaps in memory: itself, unless it is a part of something larger."""
    return x if layout_of(x) == torch.channels_last else x.contiguous()


def layout_of(x: Tensor) -> torch.memory_format:
    """Whether images lie in memory with their channels last; everything else is contiguous."""
    last = torch.channels_last
    images = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if images else torch.contiguous_format
