"""CUDA graphs: GPU work that is recorded once and replayed as a whole from then on.

Most of what a small kernel costs is its launch. A replay launches all of them at once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class RecordedGraph(Generic[Result]):
    """A CUDA graph of some work: every replay reads and writes the same memory again.

    Recordings that are replayed in the order in which they were made can share a `pool` of memory.
    Nothing else may be recorded into it.
    """

    def __init__(
        self, work: Callable[[], Result], *, device: torch.device, pool: Any = None
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # torch keeps the scratch memory of products for the next ones on the same stream. What a
        # graph uses must be its own: memory of an earlier graph is gone with that graph.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(
                self._graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"
            ):
                self.result = work()
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def replay(self) -> None:
        """Replay the graph."""
        self._graph.replay()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where work on a device is recorded: a backward pass must be on its forward pass's stream."""
    return torch.cuda.Stream(device)


class LazyCudaGraph:
    """Repeated in-place work on tensors, recorded as a CUDA graph at its third call on a GPU.

    The work must be a function of the tensors alone. The first replay is compared with the work
    itself; what does not agree, or cannot be recorded, is done kernel by kernel for good.
    """

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._times = 0
        self._recording: RecordedGraph[None] | None = None

    def run(self, work: Callable[[list[Tensor]], None], tensors: list[Tensor]) -> None:
        """Do `work` on `tensors`, by replaying its graph if there is one."""
        if not _may_record(tensors):
            work(tensors)
            return
        addresses = data_pointers(tensors)
        if addresses != self._addresses:  # a graph is tied to the memory it was recorded on
            self._addresses, self._times, self._recording = addresses, 0, None
        self._times += 1
        if self._times == 3:
            self._record(work, tensors)
        if self._recording is None:
            work(tensors)
        else:
            self._replay(self._recording, tensors)

    def _record(self, work: Callable[[list[Tensor]], None], tensors: list[Tensor]) -> None:
        before, expected = clone_all(tensors), clone_all(tensors)
        try:
            recording = RecordedGraph(lambda: work(tensors), device=tensors[0].device)
        except RuntimeError:  # a constraint of the user's own looks at values, say
            return
        work(expected)
        self._replay(recording, tensors)
        if all_are_close(tensors, expected, tolerance=1e-3):
            self._recording = recording
        else:
            warnings.warn(
                "a CUDA graph of work on the weights computes something else than that work; "
                "kernels are launched one by one",
                stacklevel=2,
            )
        torch._foreach_copy_(tensors, before)

    @staticmethod
    def _replay(recording: RecordedGraph[None], tensors: list[Tensor]) -> None:
        recording.replay()
        for tensor in tensors:  # autograd has not seen that they changed
            torch.autograd.graph.increment_version(tensor)


def data_pointers(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the data pointers of tensors."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors, by one kernel."""
    return list(torch._foreach_mul(list(tensors), 1.0))


def _may_record(tensors: list[Tensor]) -> bool:
    if torch.compiler.is_compiling() or any(not tensor.is_cuda for tensor in tensors):
        return False
    one_device = len({tensor.device for tensor in tensors}) == 1
    return one_device and not torch.cuda.is_current_stream_capturing()


def is_close(found: Tensor, expected: Tensor, *, tolerance: float) -> bool:
    """Return whether two tensors agree up to rounding; NaN differs from everything."""
    return bool((found - expected).float().norm() <= tolerance * expected.float().norm() + 1e-12)


def all_are_close(found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float) -> bool:
    """Return whether there are as many tensors, and each is close to its counterpart."""
    return len(found) == len(expected) and all(
        is_close(one, other, tolerance=tolerance)
        for one, other in zip(found, expected, strict=True)
    )
