"""What a model is called on: the names, shapes and kinds of its inputs, which are public."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import PrivacyError

_TARGETS = ("labels", "label", "label_ids", "target", "targets", "y")


@dataclass(frozen=True)
class InputSpec:
    """The inputs of a model: tensors by position and then by name, without the batch axis."""

    count: int
    """How many are given by position."""
    names: tuple[str, ...]
    """The names of the others."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    flags: tuple[tuple[str, Any], ...] = ()
    """What is no tensor, by name."""

    @classmethod
    def of(cls, args: Sequence[Any], named: Mapping[str, Any]) -> InputSpec:
        """The spec of a call on a batch; by name there may be flags and numbers beside tensors."""
        flags = {key: value for key, value in named.items() if not isinstance(value, Tensor)}
        values = [value for key, value in named.items() if key not in flags]
        odd = [each for each in args if not isinstance(each, Tensor)]
        odd += [each for each in flags.values() if not isinstance(each, bool | int | str | None)]
        tensors = [*args, *values]
        if odd or not tensors or any(each.ndim == 0 for each in tensors):
            what = f"on a {type(odd[0]).__name__}" if odd else "without a batch"
            raise PrivacyError(
                f"the private model was called {what}. Call it on tensors, one argument for each, "
                "whose first axis counts the examples: model(ids, mask) or "
                "model(input_ids=ids, attention_mask=mask)."
            )
        if "labels" in named and named["labels"] is not None:
            raise PrivacyError(
                "the private model was given labels, to compute its own loss with: a mean over the "
                "batch, whose gradients have no bound. Call it without, and give its output and "
                "the labels to the private criterion."
            )
        return cls(
            len(args), tuple(key for key in named if key not in flags),
            tuple(tuple(each.shape[1:]) for each in tensors), tuple(each.dtype for each in tensors),
            tuple(flags.items()),
        )  # fmt: skip

    def tensors(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of the spec."""
        return [*args, *(value for value in named.values() if isinstance(value, Tensor))]

    def differs_in_length(self, other: InputSpec, lengths: Sequence[int]) -> bool:
        """Whether it is the other one, but for the first axis of tensors, which have one length."""
        if self._kinds() != other._kinds():
            return False
        found = set[int]()
        for own, known in zip(self.shapes, other.shapes, strict=True):
            if own != known:
                if not own or not known or own[1:] != known[1:]:
                    return False
                found.add(own[0])
        return len(found) == 1 and found <= set(lengths)

    def _kinds(self) -> tuple[Any, ...]:
        return self.count, self.names, self.dtypes, self.flags, len(self.shapes)

    def random(self, batch: int, device: torch.device) -> list[Tensor]:
        """Inputs of ordinary size: normal numbers, tokens 0 and 1, flags."""
        generator = torch.Generator().manual_seed(0)
        found = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype.is_floating_point:
                drawn = torch.randn((batch, *shape), generator=generator).to(dtype)
            else:
                drawn = torch.randint(0, 2, (batch, *shape), generator=generator).to(dtype)
                if shape:  # masks that keep something
                    drawn.select(1, 0).fill_(1)
            found.append(drawn.to(device))
        return found


def spec_of_batch(batch: Any, model: nn.Module) -> InputSpec:
    """Return what of a loader's batch the model is probably called on.

    Of a tuple or list all but the last part, by position; of a mapping what `forward` takes, by
    name, and no labels. The first call in training shows what it really is.
    """
    if isinstance(batch, Tensor):
        return InputSpec.of((batch,), {})
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        open_ended = any(each.kind is each.VAR_KEYWORD for each in known.values())
        named = {
            key: value
            for key, value in batch.items()
            if isinstance(value, Tensor) and key not in _TARGETS and (key in known or open_ended)
        }
        return InputSpec.of((), named)
    parts = list(batch)
    return InputSpec.of(parts[:-1] if len(parts) > 1 else parts, {})


def call(model: nn.Module, spec: InputSpec, tensors: Sequence[Tensor]) -> Any:
    """Run a model's forward, past its hooks, on tensors in the places of a spec."""
    args, values = tensors[: spec.count], tensors[spec.count :]
    named = dict(zip(spec.names, values, strict=True)) | dict(spec.flags)
    return model.forward(*args, **named)
