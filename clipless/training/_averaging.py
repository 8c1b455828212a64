"""Averages of the weights along a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipless.distributed import full_tensor, reshard, write
from clipless.errors import ConstraintError
from clipless.nn import ConstrainedModule
from clipless.spectral import Certificate, Constraint


class WeightAverage:
    """A weighted mean of the weights after each step, to evaluate and to ship.

    After updates 1, ..., t with weights w_1, ..., w_t the average is

        sum_i decay^(t-i) w_i / sum_i decay^(t-i),    i from `start` to t.

    With `decay` below 1 it is an exponential moving average that is never dominated by where it
    began: the initial weights have no part in it, and the first update has no more than its share.
    With `decay=1` all iterates count the same: with a late `start`, a tail average. Before `start`
    the average is the latest iterate; before the first update, the initial weights.

    Privacy: the average is made from released weights only, so it is post-processing and costs
    nothing. (What is measured with it on private data is another matter, as with any weights.)

    Bounds: weights are averaged as they are after projection. All constraint sets are balls of a
    norm (spectral, operator, Euclidean, largest row), hence convex, and a weighted mean of members
    is a member. What can fail is the proof: rounding moves a mean by a few units in the last place,
    and the certificate of a general matrix is looser than that of an orthogonal one, by less than
    half a percent. Where a certificate does not hold, the average is scaled down until it does. It
    is not projected: that would pull averages of orthogonal matrices back to orthogonality.

    Parameters that were frozen at construction are taken from the model as they are, like buffers.
    A parameter shared by several layers is averaged once.

    Args:
        model: the model in training, on its final device and in its final dtype.
        decay: how much less each earlier iterate counts, in [0, 1].
        start: the first update that counts, from 1.
        projection: `False` for models trained without projection (`make_private` has an argument
            of this name): the average is then used as it is, and certifies nothing.

    Example:
        >>> model = torch.nn.Sequential(clipless.nn.BoundedInput(1.0),
        ...                             clipless.nn.SpectralLinear(3, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> average = WeightAverage(model, decay=0.98)
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(4, 3)).sum().backward()
        ...     optimizer.step()
        ...     clipless.project(model)  # a private optimizer does this in its step
        ...     average.update()
        >>> with average.applied(), torch.no_grad():
        ...     model(torch.randn(4, 3)).shape, model[1].certificate().holds
        (torch.Size([4, 2]), True)
    """

    def __init__(
        self, model: nn.Module, *, decay: float = 0.98, start: int = 1, projection: bool = True
    ) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must lie in [0, 1], got {decay}")
        if isinstance(start, bool) or not isinstance(start, int) or start < 1:
            raise ValueError(f"start is the number of an update, from 1, got {start!r}")
        self.decay, self.start, self.projection = decay, start, projection
        self.updates = 0
        self._model = model
        self._total = 1.0  # the sum of the weights that the iterates have in the average
        self._applied = False
        trainable = _trainable(model)
        if not trainable:
            raise ValueError("the model has no trainable parameters to average")
        self._layout = _layout(trainable)
        # Half precisions would lose small changes: their averages are kept in float32.
        self._averages = {
            name: parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in trainable.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's weights into the average. Call it after each step of the optimizer."""
        if self._applied:
            raise RuntimeError("the model holds the average: update outside the applied() block")
        averages = list(self._averages.values())
        current = [
            parameter.to(average.dtype)
            for parameter, average in zip(self._own_parameters(), averages, strict=True)
        ]
        self.updates += 1
        self._total = 1.0 if self.updates <= self.start else 1.0 + self.decay * self._total
        torch._foreach_lerp_(averages, current, 1 / self._total)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Put the averaged weights into the model for the length of a `with` block.

        Afterwards the training weights are back bit for bit, whatever happened in the block; other
        changes made to the weights inside it, such as a step of the optimizer, are lost.

        Raises:
            ConstraintError: the average is not finite.
        """
        if self._applied:
            raise RuntimeError("the model holds the average already: applied() does not nest")
        parameters = self._own_parameters()
        averaged = list(self._inside().values())
        kept = [parameter.clone() for parameter in parameters]
        self._applied = True
        try:
            _write(parameters, averaged)
            yield self._model
        finally:
            reshard(self._model)
            _write(parameters, kept)
            self._applied = False

    def averaged_parameters(self) -> dict[str, Tensor]:
        """Return copies of all parameters by name, ready to be saved: averaged, or frozen as is.

        Each parameter appears once, under the first of its names, in the model's dtype; constrained
        ones are certified members of their sets, unless `projection=False`.
        """
        averaged = self._inside()
        return {
            name: averaged[name] if name in averaged else full_tensor(parameter.detach()).clone()
            for name, parameter in self._model.named_parameters()
        }

    def copy_to(self, model: nn.Module) -> None:
        """Write the averaged weights into `model`, with this model's buffers and frozen parameters.

        `model` is one of the same architecture and dtype, on any device; or the averaged model
        itself, whose training weights are then gone.
        """
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        averaged, own_buffers = self.averaged_parameters(), dict(self._model.named_buffers())
        _require_layout(_layout(averaged), parameters, "the model to copy to")
        _require_layout(_layout(own_buffers), buffers, "the model to copy to")
        _write(list(parameters.values()), [averaged[name] for name in parameters])
        _write(list(buffers.values()), [own_buffers[name] for name in buffers])

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of the average: numbers, and tensors by parameter name."""
        return {
            "decay": self.decay,
            "start": self.start,
            "updates": self.updates,
            "total": self._total,
            "parameters": {
                name: full_tensor(average).clone() for name, average in self._averages.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a snapshot, taken of an average with the same arguments and parameters."""
        for name in ("decay", "start"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved average has {name}={state[name]}, this one "
                    f"{name}={getattr(self, name)}: make it with the saved value"
                )
        saved = state["parameters"]
        _require_layout(_layout(self._averages), saved, "the saved average")
        _write(list(self._averages.values()), [saved[name] for name in self._averages])
        self.updates, self._total = int(state["updates"]), float(state["total"])

    def _own_parameters(self) -> list[Tensor]:
        """The model's parameters in the order of the averages, if they are still what they were."""
        trainable = _trainable(self._model)
        _require_layout(self._layout, trainable, "the model, as far as it is trainable,")
        for name, average in self._averages.items():
            if trainable[name].device != average.device:
                raise ValueError(
                    f"{name} was moved from {average.device} to {trainable[name].device}. Make the "
                    "average after moving the model; load_state_dict carries an old one over."
                )
        return [trainable[name] for name in self._averages]

    @torch.no_grad()
    def _inside(self) -> dict[str, Tensor]:
        """The averages in the model's dtype, scaled into the constraint sets where need be."""
        averaged = {
            name: full_tensor(average).to(self._layout[name][1], copy=True)
            for name, average in self._averages.items()
        }
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for module in self._model.modules() if self.projection else ():
            if not isinstance(module, ConstrainedModule):
                continue
            for local_name, constraint in module.constraints().items():
                name = names[id(module.get_parameter(local_name))]
                if name in averaged:
                    averaged[name] = _scaled_into(constraint, averaged[name], name)
        return averaged


def _scaled_into(constraint: Constraint, weight: Tensor, name: str) -> Tensor:
    """Return the weight itself if it is certified, else the largest multiple that will be.

    Rounding the scaled entries moves a weight by at most `eps / 2 * ||W||_F` in any of the norms;
    four times that is kept as a margin, as the next certificate rounds too.
    """
    bound = constraint.bound(weight[None]).item()
    if Certificate(bound=bound, radius=constraint.radius, method=constraint.method).holds:
        return weight
    if not math.isfinite(bound):
        raise ConstraintError(f"the average of {name} is not finite: training has diverged")
    wide = weight.to(torch.float64)
    margin = 2 * torch.finfo(weight.dtype).eps * torch.linalg.vector_norm(wide).item()
    return (wide * (constraint.radius / (bound + margin))).to(weight.dtype)


_Layout = dict[str, tuple[torch.Size, torch.dtype]]


def _layout(tensors: Mapping[str, Tensor]) -> _Layout:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _require_layout(expected: _Layout, tensors: Mapping[str, Tensor], owner: str) -> None:
    found = _layout(tensors)
    for name in sorted(expected.keys() | found.keys()) if found != expected else ():
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{owner} does not match the average: {name} is {_describe(found.get(name))}, not "
                f"{_describe(expected.get(name))}. An average needs the parameters it was made of."
            )


def _describe(entry: tuple[torch.Size, torch.dtype] | None) -> str:
    return "absent" if entry is None else f"{tuple(entry[0])} of {entry[1]}"


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, shared ones once, as tensors that write through."""
    reshard(model)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    write(tensors, values)
    # Mixed precision keeps half copies of the weights it met; these are out of date now.
    torch.clear_autocast_cache()
