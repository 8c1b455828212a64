"""Selection of the Triton kernels, where they can be used."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor

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
