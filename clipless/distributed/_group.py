"""The processes that take a step together: a group of one, or several with a model each.

One step: every process runs its part of the sample forward and backward. Each checks its own
state, process 0 writes the ledger, and then all wait for each other; nobody goes on before
everybody has come, so a step that is not written down is taken by nobody. Gradients are summed at
their owners, which add the noise. After the optimizer's step, owners project their weights and
broadcast them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipless.common import Query
from clipless.distributed._ownership import Ownership
from clipless.distributed._processes import Processes, SingleProcess
from clipless.errors import PrivacyError
from clipless.spectral import Projection

AddNoise = Callable[[Sequence[Tensor], Sequence[Query]], None]
"""Adds noise of the given standard deviations to tensors, in place."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
CHECK_EVERY = 16
"""So many steps lie between two comparisons of the processes' weights."""


class ProcessGroup:
    """A group of one process. Groups of several override what they do together."""

    sharded = False
    """Whether each process holds a shard of every parameter, and not all of it."""
    hooks_first = False
    """Whether the hooks of a step have to run before those that gather sharded parameters."""
    noise_stream = "noise"
    """The name of the stream that this process draws its noise from."""

    def __init__(self, processes: Processes | SingleProcess | None = None) -> None:
        self.processes = processes or SingleProcess()
        self.counts: list[Tensor] = []
        """The counts of the last step, with their noise, for thresholds that follow a quantile."""

    def leave(self) -> None:
        """Undo what the group has changed of the model's wrapper."""

    def noise_prefix(self, rank: int) -> str:
        """Return what a saved state calls the noise of a process."""
        return ""

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process adds the noise to a parameter's gradient, steps and projects."""
        return True

    def without_sharding(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Show the modules of a model as they are written, without what sharding adds to them."""
        return contextlib.nullcontext()

    def check_forward(self) -> None:
        """Refuse a forward pass whose gradients would be averaged or left out."""

    def refuse_compiled(self) -> None:
        """Refuse to compile passes that have to gather parameters."""

    @contextmanager
    def all_or_none(
        self, agree_on: Callable[[], tuple[object, ...]], *, model: nn.Module, step: int
    ) -> Iterator[None]:
        """Run what must succeed in all processes, in one state, before any of them takes a step."""
        yield

    def release(
        self,
        gradients: list[Tensor],
        counts: list[Tensor],
        add_noise: AddNoise,
        queries: Sequence[Query],
    ) -> Sequence[Tensor | None]:
        """Sum over all processes and add noise, once; return the gradients that this one owns."""
        add_noise([*gradients, *counts], queries)
        self.counts = counts
        return gradients

    def project(self, projection: Projection, constrained: Sequence[Tensor]) -> None:
        """Project the weights that this process owns; `constrained` are those of all."""
        projection.apply()

    def broadcast_weights(self) -> None:
        """Send the weights of their owners to everybody, and the counts of process 0."""

    def fingerprint(self, tensors: Sequence[Tensor]) -> int:
        """Return a number that changes with any bit of what all processes release together."""
        return fingerprint(tensors)

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Complete the optimizer's state in process 0."""

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to save an optimizer's state of which this process has a part only."""

    def agrees_to_stop(self, *, requested: bool) -> bool:
        """Whether to stop after this step: at one process's request, all do after the same one."""
        return requested


class DataParallelGroup(ProcessGroup):
    """Several processes with a copy of the model each; every parameter has one owner."""

    hooks_first = True
    processes: Processes

    def __init__(
        self, processes: Processes, trainable: Sequence[Tensor], module: nn.Module
    ) -> None:
        super().__init__(processes)
        # Each process draws noise of its own, from a stream that no other one draws from.
        self.noise_stream = f"noise/{processes.rank}"
        self.ownership = Ownership(processes, trainable)
        self._trainable = list(trainable)
        self._wrapper = data_parallel(module)
        self._synchronised = True
        if self._wrapper is not None:
            self._synchronised = self._wrapper.require_backward_grad_sync
            self._wrapper.require_backward_grad_sync = False
        self._scattered = False
        """Whether the optimizer's state is distributed over the processes."""

    def leave(self) -> None:
        """Let the wrapper average gradients again."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = self._synchronised

    def noise_prefix(self, rank: int) -> str:
        """Return what a saved state calls the noise of a process."""
        return noise_prefix(rank, sharded=self.sharded)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process adds the noise to a parameter's gradient, steps and projects."""
        return self.ownership.owns(parameter)

    def check_forward(self) -> None:
        """Refuse data parallelism that would average the gradients behind our back."""
        active = DistributedDataParallel._active_ddp_module
        if active is not None and active is not self._wrapper:
            raise PrivacyError(
                "the model is called through a DistributedDataParallel that was not given to "
                "make_private: it would average gradients that have to be summed. Pass it as "
                "module=, or call the model itself, whose gradients are summed anyway."
            )
        if self._wrapper is not None and self._wrapper.require_backward_grad_sync:
            raise PrivacyError(
                "DistributedDataParallel was told to average gradients again "
                "(require_backward_grad_sync). Private training sums them itself, once a step: "
                "leave it alone."
            )

    @contextmanager
    def all_or_none(
        self, agree_on: Callable[[], tuple[object, ...]], *, model: nn.Module, step: int
    ) -> Iterator[None]:
        """Run what must succeed in all processes, in one state, before any of them takes a step."""
        try:
            yield
        except BaseException:
            with suppress(PrivacyError):  # the first reason is the one to be told
                self.processes.meet(state=None, failed=True)
            raise
        due = step % CHECK_EVERY == 0 and not self.sharded
        weights = fingerprint(list(model.parameters())) if due else 0
        self.processes.meet(state=(*agree_on(), weights), failed=False)

    def release(
        self,
        gradients: list[Tensor],
        counts: list[Tensor],
        add_noise: AddNoise,
        queries: Sequence[Query],
    ) -> Sequence[Tensor | None]:
        """Sum over all processes and add noise; return the gradients that this one owns."""
        summed = self.ownership.add_up(gradients, counts)
        mine = [(each, q) for each, q in zip(summed, queries, strict=True) if each is not None]
        add_noise([each for each, _ in mine], [query for _, query in mine])
        # They go to everybody with the weights, in one message of one format.
        self.counts = [
            (torch.zeros_like(count) if own is None else own).to(self._trainable[0].dtype)
            for count, own in zip(counts, summed[len(gradients) :], strict=True)
        ]
        self._scattered = True
        return summed[: len(gradients)]

    def broadcast_weights(self) -> None:
        """Send the weights of their owners to everybody, and the counts of process 0."""
        self.ownership.broadcast(self.counts)

    def fingerprint(self, tensors: Sequence[Tensor]) -> int:
        """Return a number that changes with any bit of what all processes release together."""
        total = torch.tensor(fingerprint(tensors, salt=self.processes.rank))
        dist.all_reduce(total)
        return int(total)

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Complete the optimizer's state in process 0."""
        self.ownership.gather_optimizer_state(self.processes, optimizer, self._trainable)
        self._scattered = not self.processes.first

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to save the part of an optimizer's state that this process has."""
        if self._scattered:
            raise PrivacyError(
                "each process has the optimizer's state of its own parameters only. Call "
                "engine.gather_optimizer_state() in all processes, then "
                "optimizer.state_dict() in process 0."
            )

    def agrees_to_stop(self, *, requested: bool) -> bool:
        """Whether to stop after this step: at one process's request, all do after the same one."""
        if self.processes.stop_agreed:
            return True
        self.processes.stop_wanted = requested
        return False


def noise_prefix(rank: int, *, sharded: bool) -> str:
    """Return what a saved state calls the noise of one of several processes."""
    return f"{rank}/part/" if sharded else f"{rank}/"


def data_parallel(module: nn.Module) -> DistributedDataParallel | None:
    """Return the data-parallel wrapper around a model, if there is one."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    if not isinstance(module, DistributedDataParallel):
        return None
    odd = [
        name
        for name in ("find_unused_parameters", "static_graph", "mixed_precision")
        if getattr(module, name, None)
    ]
    if odd or module._comm_hooks:
        raise PrivacyError(
            f"DistributedDataParallel was made with {', '.join(odd) or 'a communication hook'}, "
            "which has no part in private training: gradients are summed without it, once a step, "
            "and what a hook does to them has no bound. Leave it out, or pass the model itself."
        )
    return module


def fingerprint(tensors: Sequence[Tensor], *, salt: int = 0) -> int:
    """Return 64 bits, with a sign, of a SHA-256 of the tensors; waits for their device."""
    digest = hashlib.sha256(f"clipless/fingerprint/{salt}".encode())
    for tensor in tensors:
        flat = tensor.detach().cpu().reshape(-1).view(_INTEGERS[tensor.element_size()])
        digest.update(flat.contiguous().numpy().data)
    return int.from_bytes(digest.digest()[:8], signed=True)
