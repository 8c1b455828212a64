"""A group of processes that each hold a shard of every parameter.

Gradients arrive summed, each shard where it lives, and get their noise there. To be projected, a
weight is gathered at one process, which projects it and sends the parts back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipless.common import Query
from clipless.distributed._group import AddNoise, DataParallelGroup
from clipless.distributed._processes import Processes, process_lost
from clipless.distributed._sharded import (
    check_sharding,
    check_summed,
    local,
    rows_of,
    sharded_modules,
    sum_gradients,
    without_sharding,
)
from clipless.errors import PrivacyError
from clipless.spectral import Projection


class ShardedGroup(DataParallelGroup):
    """Several processes of which each holds a shard of every parameter."""

    sharded = True

    def __init__(self, processes: Processes, trainable: Sequence[Tensor], model: nn.Module) -> None:
        check_sharding(model, size=processes.size)
        super().__init__(processes, trainable, model)
        self._model = model
        sum_gradients(model)

    def leave(self) -> None:
        """Let gradients be averaged again, as is the default."""
        for module in sharded_modules(self._model):
            module.set_gradient_divide_factor(float(self.processes.size))

    def without_sharding(self, model: nn.Module) -> AbstractContextManager[None]:
        """Show the modules of a model as they are written, without what sharding adds to them."""
        return without_sharding(model)

    def refuse_compiled(self) -> None:
        """Refuse compiled passes: they go around the hooks that gather sharded parameters."""
        raise PrivacyError(
            "the passes of a sharded model cannot be compiled by the engine. Leave compile out, or "
            "pass the model itself instead of fully_shard(model)."
        )

    def check_forward(self) -> None:
        """Refuse a model whose gradients would not be summed."""
        check_summed(self._model)

    def release(
        self,
        gradients: list[Tensor],
        counts: list[Tensor],
        add_noise: AddNoise,
        queries: Sequence[Query],
    ) -> Sequence[Tensor | None]:
        """Add noise to the part of the summed gradients that this process holds."""
        mine = [local(gradient) for gradient in gradients]
        if counts:
            together = torch.cat(counts)
            dist.reduce(together, dst=0)
            self.counts = list(together.split(1))
            if self.processes.first:
                mine += self.counts
        add_noise(mine, queries[: len(mine)])
        if counts:
            dist.broadcast(together, src=0)
        return [*gradients]

    def broadcast_weights(self) -> None:
        """Every shard is where it belongs."""

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The states are sharded as the parameters are, and torch knows how to save them."""

    @torch.no_grad()
    def project(self, projection: Projection, constrained: Sequence[Tensor]) -> None:
        """Project the weights, each in the process that owns it.

        `projection` is that of the weights this process owns, `constrained` are those of all.
        """
        size, rank = self.processes.size, self.processes.rank
        owners = self.ownership.owners_of(constrained)
        mine = [p for p, owner in zip(constrained, owners, strict=True) if owner == rank]
        by_owner = [
            [local(p) for p, owner in zip(constrained, owners, strict=True) if owner == each]
            for each in range(size)
        ]
        out_sizes = [sum(part.numel() for part in parts) for parts in by_owner]
        rows = [rows_of(p.shape[0], size) for p in mine]
        lengths = [[n * (p.numel() // p.shape[0]) for p, n in zip(mine, each, strict=True)]
                   for each in zip(*rows, strict=True)] or [[] for _ in range(size)]  # fmt: skip
        in_sizes = [sum(each) for each in lengths]
        outgoing = torch.cat([part.reshape(-1) for parts in by_owner for part in parts])
        incoming = outgoing.new_empty(sum(in_sizes))
        _exchange(incoming, outgoing, in_sizes, out_sizes)
        pieces = [list(part.split(n)) for part, n in zip(incoming.split(in_sizes), lengths,
                                                          strict=True)]  # fmt: skip
        weights = {
            id(p): torch.cat([pieces[source][index] for source in range(size)]).view(p.shape)
            for index, p in enumerate(mine)
        }
        projected = projection([weights[id(p)] for p in projection.parameters])
        weights |= {id(p): w for p, w in zip(projection.parameters, projected, strict=True)}
        cut = [
            torch.cat([part.reshape(-1) for part in each]) if each else incoming.new_empty(0)
            for each in (
                [weights[id(p)].split(n)[source] for p, n in zip(mine, rows, strict=True)]
                for source in range(size)
            )
        ]
        _exchange(outgoing, torch.cat(cut), out_sizes, in_sizes)
        targets = [part for parts in by_owner for part in parts]
        arrived = outgoing.split([part.numel() for part in targets])
        torch._foreach_copy_(targets, [a.view(t.shape) for a, t in zip(arrived, targets,
                                                                       strict=True)])  # fmt: skip


def _exchange(into: Tensor, given: Tensor, into_sizes: list[int], given_sizes: list[int]) -> None:
    try:
        dist.all_to_all_single(into, given, into_sizes, given_sizes)
    except RuntimeError as error:
        raise process_lost(error) from error
