"""Training with several processes: process 0 keeps the run folder, the others follow."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from clipless.common import not_set_error
from clipless.distributed import Processes, full_optimizer_state, is_sharded, noise_prefix
from clipless.errors import PrivacyError
from clipless.folders import RunFolder
from clipless.privacy import noise_names
from clipless.training._metrics import RunningMetrics
from clipless.training._run_folder import SavedRun, TrainerFolder
from clipless.training._state import generator_states, restore_generators


def join_torchrun() -> torch.device | None:
    """Join the processes that `torchrun` has started, if it did; return this one's GPU, if any."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "LOCAL_RANK" not in os.environ:
        return None
    local = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.is_available()
    if gpu:
        started, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if started > there:
            raise PrivacyError(
                f"torchrun has started {started} processes on a machine with {there} GPUs: give "
                f"--nproc-per-node={there}, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on "
                "the CPU"
            )
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        _meet_others("cpu:gloo,cuda:nccl" if gpu else "gloo")
        atexit.register(_leave)
    return torch.device("cuda", local) if gpu else None


def _meet_others(backend: str) -> None:
    """Make the process group.

    After a failure `torchrun` starts its processes again (`--max-restarts`) beside the same store.
    In it torch would find the addresses of processes that are gone: each attempt has its own keys.
    """
    store, rank, size = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"clipless/attempt-{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class SharedFolder:
    """The folder of a run, which process 0 reads and writes for all. It need not be shared."""

    def __init__(self, path: str | os.PathLike[str], *, keep: int, processes: Processes) -> None:
        self._processes = processes
        self._folder: TrainerFolder | None = None
        self.ledger = RunFolder(path).ledger
        processes.from_first(lambda: self._open(path, keep))

    def _open(self, path: str | os.PathLike[str], keep: int) -> None:
        self._folder = TrainerFolder(path, keep=keep)

    def saved(self, description: Mapping[str, Any], *, resume: bool) -> SavedRun | None:
        """Return the state to go on from, in all processes; see `TrainerFolder.saved`."""

        def read() -> SavedRun | None:
            if self._folder is None:
                raise not_set_error("folder")
            return self._folder.saved(description, resume=resume)

        return self._processes.from_first(read)

    def begin(self, description: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        """Write down what the run is about."""
        if self._folder is not None:
            self._folder.begin(description, plan)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        weights: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        average: Mapping[str, torch.Tensor] | None,
        ledger: str,
        step: int,
    ) -> None:
        """Write a checkpoint, in process 0."""
        if self._folder is not None:
            self._folder.save(
                state, weights=weights, optimizer=optimizer, average=average, ledger=ledger,
                step=step,
            )  # fmt: skip


def open_folder(
    path: str | os.PathLike[str], *, keep: int, processes: Processes | None
) -> TrainerFolder | SharedFolder:
    """The folder of a run, for one process or several."""
    if processes is None:
        return TrainerFolder(path, keep=keep)
    return SharedFolder(path, keep=keep, processes=processes)


def noise_places(model: nn.Module, processes: Processes | None) -> set[str]:
    """Return what a saved state calls the noise of all processes."""
    if processes is None:
        return noise_names([""])
    sharded = is_sharded(model)
    return noise_names(noise_prefix(rank, sharded=sharded) for rank in range(processes.size))


def total_metrics(running: RunningMetrics, processes: Processes | None) -> RunningMetrics:
    """The sums of all processes together."""
    if processes is None:
        return running
    states = processes.gather(running.state_dict())
    total = {name: sum(state[name] for state in states) for name in ("loss", "right", "examples")}
    return RunningMetrics.from_state_dict({**total, "steps": running.steps})


def own_metrics(state: dict[str, float], processes: Processes | None) -> RunningMetrics:
    """This process's part of saved sums: whose part it was makes no difference."""
    if processes is None:
        return RunningMetrics.from_state_dict(state)
    share = {name: value / processes.size for name, value in state.items() if name != "steps"}
    metrics = RunningMetrics.from_state_dict({**share, "steps": state["steps"]})
    metrics.share = processes.size
    return metrics


def optimizer_state(
    optimizer: torch.optim.Optimizer, processes: Processes | None, model: nn.Module
) -> dict[str, Any]:
    """The whole state of an optimizer, in process 0 at least."""
    if is_sharded(model) or processes is None or processes.first:
        return full_optimizer_state(optimizer)
    return {}


def all_generator_states(processes: Processes | None) -> Any:
    """The states of the global generators: of this process, or a list with those of all."""
    states = generator_states()
    return states if processes is None else processes.gather(states)


def restore_own_generators(states: Any, processes: Processes | None) -> None:
    """Set the global generators to what they were in the process of this rank."""
    if isinstance(states, list):
        states = states[(0 if processes is None else processes.rank) % len(states)]
    restore_generators(states)
