"""`TensorModel`: a model of named inputs as one of positional tensors that returns a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from clipless.errors import PrivacyError


class TensorModel(nn.Module):
    """Calls a model by the names of its inputs, and returns its logits alone.

    Private training takes models of one or several tensors that return the tensor for the
    criterion; those of transformers take named inputs and return several things. The parameters
    are those of `model`, which is left as it is.

    Args:
        model: the model.
        inputs: the names of its inputs, in the order in which they are given.
        output: the name of the tensor that it returns among others.

    Example:
        >>> class Named(torch.nn.Module):
        ...     def forward(self, *, features):
        ...         return {"logits": 2 * features}
        >>> TensorModel(Named(), inputs=["features"])(torch.ones(1, 2))
        tensor([[2., 2.]])
    """

    def __new__(cls, model: nn.Module, *, inputs: Sequence[str], output: str = "logits") -> Any:
        """Return an object of a class whose `forward` has as many arguments as there are inputs."""
        if len(inputs) not in _FORWARDS:
            raise PrivacyError(
                f"the model is called with {len(inputs)} tensors ({', '.join(inputs)}); one to "
                f"{len(_FORWARDS)} can be given. Leave those out that it does without."
            )
        # Tracing reads the arguments' number off the function.
        made = type(cls.__name__, (cls,), {"forward": _FORWARDS[len(inputs)]})
        return super().__new__(made)

    def __init__(self, model: nn.Module, *, inputs: Sequence[str], output: str = "logits") -> None:
        super().__init__()
        self.model = model
        self.inputs, self.output = tuple(inputs), output

    def call(self, *tensors: Any) -> Any:
        """Return the model's logits for its inputs by position."""
        return logits_of(self.model(**dict(zip(self.inputs, tensors, strict=True))), self.output)


_FORWARDS: dict[int, Callable[..., Any]] = {
    1: lambda self, a: self.call(a),
    2: lambda self, a, b: self.call(a, b),
    3: lambda self, a, b, c: self.call(a, b, c),
    4: lambda self, a, b, c, d: self.call(a, b, c, d),
}


def logits_of(output: Any, name: str) -> Any:
    """Return the tensor for the criterion from what a model has returned."""
    if isinstance(output, Mapping):
        return output[name]
    return output[0] if isinstance(output, tuple) else output
