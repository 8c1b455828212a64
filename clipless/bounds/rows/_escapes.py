"""Ways on which values of examples leave what a trace of operators follows: refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipless.bounds.rows._rule import advised
from clipless.errors import UnsupportedOperationError

_VALUES = {
    "tolist", "numpy", "__array__", "apply_", "map_", "map2_", "data_ptr", "storage",
    "untyped_storage", "__reduce_ex__", "__dlpack__",
}  # fmt: skip
_GRADIENTS = {"register_hook", "grad_fn"}


class NoEscapes(TorchFunctionMode):
    """Refuses what reads the values of examples, or changes their gradients, past all operators.

    `carries` says whether a tensor depends on examples, and `refused` is told of the refusal.
    """

    def __init__(
        self, carries: Callable[[Tensor], bool],
        refused: Callable[[UnsupportedOperationError], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._carries, self._refused = carries, refused

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Let a function work, unless it is one of those."""
        name = getattr(function, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(function.__self__, "__name__", "")
        if name in _VALUES or name in _GRADIENTS:
            given = args if name in ("map_", "map2_") else args[:1]
            if any(isinstance(each, Tensor) and self._carries(each) for each in given):
                error = _refusal(name)
                self._refused(error)
                raise error
        return function(*args, **(kwargs or {}))


def refuse_rewriting_of_activations() -> None:
    """Refuse a hook that packs what is saved for the backward pass, unless it is torch's own."""
    packing: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if packing is not None:
        kind = str(getattr(packing[0], "__module__", ""))
        if not kind.startswith(("torch.", "clipless.")):
            raise advised(
                f"saved_tensors_hooks ({kind}): what is kept for the backward pass is replaced by "
                "something of which a trace of the forward pass says nothing"
            )


def _refusal(name: str) -> UnsupportedOperationError:
    if name in _GRADIENTS:
        return advised(
            f"Tensor.{name}: a hook on what depends on examples could change, or mix, their "
            "gradients unseen"
        )
    return advised(
        f"Tensor.{name}: values of the examples leave torch's operators, so that what becomes of "
        "them cannot be followed"
    )
