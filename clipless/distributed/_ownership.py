"""Which process looks after which parameters, and how gradients and weights travel.

Every parameter has one owner. Gradients are summed at the owner, which adds the noise, takes the
optimizer's step and projects; then the new weight goes from the owner to everybody. The sum to an
owner and the way back are the two halves of an all-reduce, so that noise, step and projection are
shared out instead of repeated. Sums travel in float64, which keeps their digits, and weights in
their own format: half as much again as ordinary data parallelism sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipless.distributed._processes import Processes, process_lost
from clipless.errors import PrivacyError


class Ownership:
    """Which process owns which of the trainable parameters."""

    def __init__(self, processes: Processes, trainable: Sequence[Tensor]) -> None:
        places = {(p.device, p.dtype) for p in trainable}
        if len(places) > 1:
            raise PrivacyError(
                "the trainable parameters lie on several devices, or have several dtypes. In "
                "distributed training every process keeps its model on one device."
            )
        self._rank, self._size = processes.rank, processes.size
        self._trainable = [p.detach() for p in trainable]
        self.owners = share_out([p.numel() for p in trainable], self._size)
        """The owner of each parameter, in the order of the plan."""
        self._names = [id(p) for p in trainable]
        self._own = {id(p) for p, owner in zip(trainable, self.owners, strict=True)
                     if owner == self._rank}  # fmt: skip

    def owners_of(self, parameters: Sequence[Tensor]) -> list[int]:
        """The owners of some of the parameters."""
        known = dict(zip(self._names, self.owners, strict=True))
        return [known[id(parameter)] for parameter in parameters]

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process looks after a parameter."""
        return id(parameter) in self._own

    def add_up(self, gradients: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor | None]:
        """Sum over all processes; return what this one owns, and None for the rest.

        `counts` are added up as well, and belong to process 0.
        """
        tensors = [*gradients, *counts]
        owners = [*self.owners, *(0 for _ in counts)]
        parts = [
            [each.reshape(-1) for each, owner in zip(tensors, owners, strict=True) if owner == rank]
            for rank in range(self._size)
        ]
        flat = [torch.cat(part) if part else None for part in parts]
        try:
            works = [
                dist.reduce(each, dst=rank, async_op=True)
                for rank, each in enumerate(flat)
                if each is not None
            ]
            _wait(works)
        except RuntimeError as error:
            raise process_lost(error) from error
        mine = flat[self._rank]
        sizes = [each.numel() for each, o in zip(tensors, owners, strict=True) if o == self._rank]
        summed = iter([] if mine is None else mine.split(sizes))
        return [
            next(summed).view(each.shape) if owner == self._rank else None
            for each, owner in zip(tensors, owners, strict=True)
        ]

    @torch.no_grad()
    def broadcast(self, counts: Sequence[Tensor]) -> None:
        """Let everybody have the weights as their owners hold them, and the counts of process 0."""
        tensors = [*self._trainable, *counts]
        owners = [*self.owners, *(0 for _ in counts)]
        works, incoming = [], []
        try:
            for rank in range(self._size):
                part = [each for each, owner in zip(tensors, owners, strict=True) if owner == rank]
                if not part:
                    continue
                if rank == self._rank:
                    flat = torch.cat([each.reshape(-1) for each in part])
                else:
                    flat = part[0].new_empty(sum(each.numel() for each in part))
                    incoming.append((part, flat))
                works.append(dist.broadcast(flat, src=rank, async_op=True))
            _wait(works)
        except RuntimeError as error:
            raise process_lost(error) from error
        for part, flat in incoming:
            pieces = flat.split([each.numel() for each in part])
            torch._foreach_copy_(part, [p.view(e.shape) for p, e in zip(pieces, part, strict=True)])

    def gather_optimizer_state(
        self, processes: Processes, optimizer: torch.optim.Optimizer, trainable: Sequence[Tensor]
    ) -> None:
        """Bring the optimizer's states of all parameters to process 0."""
        mine = {
            index: {name: _to_cpu(value) for name, value in optimizer.state[parameter].items()}
            for index, parameter in enumerate(trainable)
            if self.owners[index] == self._rank and parameter in optimizer.state
        }
        everybody = processes.gather(mine)
        if not processes.first:
            return
        for index, state in (item for each in everybody[1:] for item in each.items()):
            parameter = trainable[index]
            optimizer.state[parameter] = {
                name: value.to(parameter.device) if moved else value
                for name, (value, moved) in state.items()
            }


def share_out(sizes: Sequence[int], count: int) -> list[int]:
    """Give every parameter to one of `count` owners, the largest first to whoever has least.

    Example:
        >>> share_out([100, 10, 60, 50], 2)
        [0, 0, 1, 1]
    """
    loads, owners = [0] * count, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


@torch.no_grad()
def share_weights(model: nn.Module) -> None:
    """Give all processes the parameters and buffers of process 0, as data parallelism does."""
    works = [
        dist.broadcast(tensor.detach(), src=0, async_op=True)
        for tensor in (*model.parameters(), *model.buffers())
    ]
    _wait(works)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _to_cpu(value: Any) -> tuple[Any, bool]:
    """A value that can be sent, and whether it was on an accelerator."""
    if not isinstance(value, Tensor):
        return value, False
    return value.detach().cpu(), value.device.type != "cpu"
