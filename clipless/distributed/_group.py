"""A session's part in a step that several processes take together.

One step: every process runs its part of the sample forward and backward. Each checks its own
state, process 0 writes the ledger, and then all meet; nobody goes on before everybody has come, so
a step that is not written down is taken by nobody. Gradients are summed at their owners, which add
the noise. After the optimizer's step, owners project and send the weights around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipless.common import Query, not_set_error
from clipless.distributed._fingerprint import fingerprint
from clipless.distributed._ownership import Shares
from clipless.distributed._processes import Processes
from clipless.errors import PrivacyError

if TYPE_CHECKING:
    from clipless.privacy import TrainingSession

AddNoise = Callable[[Sequence[Tensor], Sequence[Query]], None]
"""Adds noise of the given standard deviations to tensors, in place."""

CHECK_EVERY = 16
"""So many steps lie between two comparisons of the processes' weights."""


class Team:
    """What a session does together with those of other processes."""

    sharded = False
    """Whether each process holds a part of every parameter, and not all of them."""

    def __init__(
        self, processes: Processes, trainable: Sequence[Tensor], module: nn.Module
    ) -> None:
        self.processes = processes
        self.shares = Shares(processes, trainable)
        self._trainable = list(trainable)
        self._wrapper = data_parallel(module)
        self._synchronised = True
        if self._wrapper is not None:
            self._synchronised = self._wrapper.require_backward_grad_sync
            self._wrapper.require_backward_grad_sync = False
        self.counts: list[Tensor] = []
        """The counts of the last step, with their noise, for thresholds that follow a quantile."""
        self._scattered = False
        """Whether the optimizer's state is spread over the processes."""

    def leave(self) -> None:
        """Let the wrapper average gradients again."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = self._synchronised

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

    def release(
        self,
        gradients: list[Tensor],
        counts: list[Tensor],
        add_noise: AddNoise,
        queries: Sequence[Query],
    ) -> list[Tensor | None]:
        """Sum over all processes and add noise; return the gradients that this one owns."""
        summed = self.shares.add_up(gradients, counts)
        mine = [(each, q) for each, q in zip(summed, queries, strict=True) if each is not None]
        add_noise([each for each, _ in mine], [query for _, query in mine])
        self.counts = [
            torch.zeros_like(count) if own is None else own
            for count, own in zip(counts, summed[len(gradients) :], strict=True)
        ]
        self._scattered = True
        return summed[: len(gradients)]

    def spread(self) -> None:
        """Send the weights of their owners around, and the counts of process 0."""
        self.shares.spread(self.counts)

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Complete the optimizer's state in process 0."""
        self.shares.gather_optimizer_state(self.processes, optimizer, self._trainable)
        self._scattered = not self.processes.first

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to save the part of an optimizer's state that this process has."""
        if self._scattered:
            raise PrivacyError(
                "each process has the optimizer's state of its own parameters only. Call "
                "engine.gather_optimizer_state() in all processes, then "
                "optimizer.state_dict() in process 0."
            )


@contextmanager
def meeting(session: TrainingSession) -> Iterator[None]:
    """Run what must succeed in all processes before any of them takes a step."""
    team = session.team
    if team is None:
        yield
        return
    try:
        yield
    except BaseException:
        with suppress(PrivacyError):  # the first reason is the one to be told
            team.processes.meet(state=None, failed=True)
        raise
    team.processes.meet(state=_state_of(session), failed=False)


def _state_of(session: TrainingSession) -> tuple[Any, ...]:
    progress = session._book.progress
    if progress is None:
        raise not_set_error("progress")
    if session.team is None:
        raise not_set_error("team")
    due = session.steps_taken % CHECK_EVERY == 0 and not session.team.sharded
    weights = fingerprint(list(session.model.parameters())) if due else 0
    return (progress.step, progress.micro_batches, session.plan.noise_multiplier, weights)


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
