"""Projection and certification of many weights, those of one shape as one stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import ConstraintError
from clipless.kernels import LazyCudaGraph
from clipless.spectral import Certificate, Constraint, project_batched


class Projection:
    """The projection of a model's weights, prepared once for many steps.

    Called with weights, it is a pure function of tensors of known shapes, which on a GPU waits for
    nothing: a compiler or a CUDA graph can take it in. `apply` projects the model itself; on a GPU
    the third and later times are the replay of a graph. `prepare_projection` makes one.
    """

    parameters: list[nn.Parameter]
    """The constrained parameters, each once; what a call takes and returns is in this order."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> None:
        self._signature = _signature(pairs)
        # Layers that share a weight share its constraint: it is projected once.
        once = {id(parameter): (parameter, constraint) for parameter, constraint in pairs}
        self.parameters = [parameter for parameter, _ in once.values()]
        self._groups = _groups(self.parameters, [constraint for _, constraint in once.values()])
        self._habit = LazyCudaGraph()
        self._function: Callable[..., Sequence[Tensor]] = self._plain

    def compute_by(self, function: Callable[..., Sequence[Tensor]]) -> None:
        """Make `apply` use `function(*weights)`, which must return what a call returns."""
        self._function, self._habit = function, LazyCudaGraph()

    @property
    def computes_itself(self) -> bool:
        """Whether no function was set by `compute_by`."""
        return self._function == self._plain

    def _plain(self, *weights: Tensor) -> list[Tensor]:
        return self(weights)

    def fits(self, pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> bool:
        """Whether this is the projection of these parameters into these constraints."""
        return self._signature == _signature(pairs)

    @torch.no_grad()
    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the projected weights; nothing is changed in place."""
        current = list(weights)
        stacks = [_stack([current[index] for index in members]) for _, members in self._groups]
        projected = project_batched(stacks, [constraint for constraint, _ in self._groups])
        for (_, members), stack in zip(self._groups, projected, strict=True):
            for index, weight in zip(members, stack.unbind(), strict=True):
                current[index] = weight
        return current

    def apply(self) -> None:
        """Project the parameters, in place."""
        if not self.parameters:
            return
        parameters = [parameter.detach() for parameter in self.parameters]
        if parameters[0].is_cuda:
            self._habit.run(self._write, parameters)
        else:
            self._write(parameters)

    def _write(self, parameters: list[Tensor]) -> None:
        torch._foreach_copy_(parameters, list(self._function(*parameters)))


@torch.no_grad()
def certificates_of(pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> list[Certificate]:
    """Return a proved bound of every weight's norm."""
    bounds = [0.0] * len(pairs)
    parameters = [parameter for parameter, _ in pairs]
    for constraint, members in _groups(parameters, [constraint for _, constraint in pairs]):
        stacked = torch.stack([parameters[index].detach() for index in members])
        for index, bound in zip(members, constraint.bound(stacked).tolist(), strict=True):
            bounds[index] = bound
    return [
        Certificate(bound=bound, radius=constraint.radius, method=constraint.method)
        for bound, (_, constraint) in zip(bounds, pairs, strict=True)
    ]


def refuse_two_constraints(named: Iterable[tuple[str, nn.Parameter, Constraint]]) -> None:
    """Refuse weights that two layers share, under constraints that are not the same.

    Projection into one set leaves the other: norms of 1.41 times the claimed one were found.
    """
    known: dict[Any, tuple[str, Constraint]] = {}
    for name, parameter, constraint in named:
        first, wanted = known.setdefault(_memory(parameter), (name, constraint))
        if wanted != constraint:
            raise ConstraintError(
                f"{first} and {name} are one weight under two constraints, {wanted} and "
                f"{constraint}. No projection keeps both: give the layers the same type, norm and "
                "geometry, or weights of their own."
            )


def _memory(parameter: nn.Parameter) -> Any:
    """What two names of the same numbers have in common: their place in memory, where known."""
    plain = type(parameter.data) is Tensor and not parameter.is_meta
    address = parameter.data_ptr() if plain else 0
    return (parameter.device, address) if address else id(parameter)


def _signature(pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> list[Any]:
    return [
        (id(parameter), parameter.shape, parameter.dtype, parameter.device, constraint)
        for parameter, constraint in pairs
    ]


def _stack(weights: list[Tensor]) -> Tensor:
    return weights[0].unsqueeze(0) if len(weights) == 1 else torch.stack(weights)


def _groups(
    parameters: Sequence[nn.Parameter], constraints: Sequence[Constraint]
) -> list[tuple[Constraint, list[int]]]:
    """Group parameters by constraint, shape, dtype and device: each group is one stack."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for index, (parameter, constraint) in enumerate(zip(parameters, constraints, strict=True)):
        groups[constraint, parameter.shape, parameter.dtype, parameter.device].append(index)
    return [(key[0], members) for key, members in groups.items()]
