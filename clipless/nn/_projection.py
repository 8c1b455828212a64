"""Projection and certification of many weights, those of one shape as one stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        self._replay = _Replay()
        self._function: Callable[..., Sequence[Tensor]] = self._plain

    def compute_by(self, function: Callable[..., Sequence[Tensor]]) -> None:
        """Let `apply` compute by `function(*weights)`, which must return what a call returns."""
        self._function, self._replay = function, _Replay()

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
            self._replay.run(self._write, [parameter.detach() for parameter in self.parameters])

    def _write(self, parameters: list[Tensor]) -> None:
        torch._foreach_copy_(parameters, list(self._function(*parameters)))


class _Replay:
    """In-place work on tensors on a GPU, recorded as a CUDA graph once it has become a habit.

    Most of what a small kernel costs is its launch. A replay launches all of them at once.
    """

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._times = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, work: Callable[[list[Tensor]], None], tensors: list[Tensor]) -> None:
        """Do `work` on `tensors`."""
        if not _may_record(tensors):
            work(tensors)
            return
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:  # a graph is tied to the memory it was recorded on
            self._addresses, self._times, self._graph = addresses, 0, None
        self._times += 1
        if self._times == 3:
            self._graph = _record(work, tensors)
        if self._graph is None:
            work(tensors)
            return
        self._graph.replay()
        for tensor in tensors:  # autograd has not seen that they changed
            torch.autograd.graph.increment_version(tensor)


def _may_record(tensors: list[Tensor]) -> bool:
    if torch.compiler.is_compiling() or any(not tensor.is_cuda for tensor in tensors):
        return False
    one_device = len({tensor.device for tensor in tensors}) == 1
    return one_device and not torch.cuda.is_current_stream_capturing()


def _record(
    work: Callable[[list[Tensor]], None], tensors: list[Tensor]
) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    # torch keeps the scratch memory of products for the next ones on the same stream. What a graph
    # uses must be its own: memory of an earlier graph is gone with that graph.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work(tensors)
    except RuntimeError:  # a constraint of the user's own looks at values, say
        return None
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


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
