"""Projection and certification of many weights, those of one shape as one stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipless._graphs import Habit
from clipless.spectral import Certificate, Constraint, project_together


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
        self.parameters = list({id(parameter): parameter for parameter, _ in pairs}.values())
        place = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        # A weight shared by layers of different norms ends in the smallest of its sets, so it
        # takes several rounds, each with a constraint for every weight at most.
        rounds: list[list[tuple[int, Constraint]]] = []
        taken = [0] * len(self.parameters)
        for parameter, constraint in sorted(pairs, key=lambda pair: -pair[1].radius):
            index = place[id(parameter)]
            if taken[index] == len(rounds):
                rounds.append([])
            rounds[taken[index]].append((index, constraint))
            taken[index] += 1
        self._rounds = [_groups(self.parameters, members) for members in rounds]
        self._habit = Habit()
        self._function: Callable[..., Sequence[Tensor]] = self._plain

    def compute_by(self, function: Callable[..., Sequence[Tensor]]) -> None:
        """Let `apply` compute by `function(*weights)`, which must return what a call returns."""
        self._function, self._habit = function, Habit()

    @property
    def computes_itself(self) -> bool:
        """Whether nobody has said `compute_by`."""
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
        for groups in self._rounds:
            stacks = [_stack([current[index] for index in members]) for _, members in groups]
            projected = project_together(stacks, [constraint for constraint, _ in groups])
            for (_, members), stack in zip(groups, projected, strict=True):
                for index, weight in zip(members, stack.unbind(), strict=True):
                    current[index] = weight
        return current

    def apply(self) -> None:
        """Project the parameters, in place."""
        if self.parameters:
            self._habit.run(self._write, [parameter.detach() for parameter in self.parameters])

    def _write(self, parameters: list[Tensor]) -> None:
        torch._foreach_copy_(parameters, list(self._function(*parameters)))


@torch.no_grad()
def certificates_of(pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> list[Certificate]:
    """Return a proved bound of every weight's norm."""
    bounds = [0.0] * len(pairs)
    parameters = [parameter for parameter, _ in pairs]
    constraints = [(index, constraint) for index, (_, constraint) in enumerate(pairs)]
    for constraint, members in _groups(parameters, constraints):
        stacked = torch.stack([parameters[index].detach() for index in members])
        for index, bound in zip(members, constraint.bound(stacked).tolist(), strict=True):
            bounds[index] = bound
    return [
        Certificate(bound=bound, radius=constraint.radius, method=constraint.method)
        for bound, (_, constraint) in zip(bounds, pairs, strict=True)
    ]


def _signature(pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> list[Any]:
    return [
        (id(parameter), parameter.shape, parameter.dtype, parameter.device, constraint)
        for parameter, constraint in pairs
    ]


def _stack(weights: list[Tensor]) -> Tensor:
    return weights[0].unsqueeze(0) if len(weights) == 1 else torch.stack(weights)


def _groups(
    parameters: Sequence[nn.Parameter], constraints: Sequence[tuple[int, Constraint]]
) -> list[tuple[Constraint, list[int]]]:
    """Group parameters by constraint, shape, dtype and device: each group is one stack."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for index, constraint in constraints:
        parameter = parameters[index]
        groups[constraint, parameter.shape, parameter.dtype, parameter.device].append(index)
    return [(key[0], members) for key, members in groups.items()]
