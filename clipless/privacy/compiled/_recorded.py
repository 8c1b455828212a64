"""A model's passes and its criterion as CUDA graphs: three launches where there were hundreds.

A graph reads and writes the same memory at every replay. None of that memory is handed out: what
somebody kept of one step must not turn into something of the next one, which has no noise yet.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.kernels import AnyFunction, RecordedGraph, all_are_close, clone_all, data_pointers

if TYPE_CHECKING:
    from clipless.privacy.step._enforcement import BackwardPass, Enforcement

_MOST_BEGINNINGS = 8
"""After how many changes nothing is recorded any more: a recording takes as long as many steps."""


class Recorded:
    """A function of tensors, recorded at its second call and replayed from then on.

    The first call is left alone: it compiles, and loads what can be loaded only once. Then
    `wanted(*arguments)` is asked whether to record at all. Arguments of other shapes go to the
    function itself. `parts()` lists what the function was compiled from, and `tensors()` what it
    reads besides its arguments: where these are other objects, or have moved, it begins anew.
    """

    def __init__(
        self,
        function: AnyFunction,
        *,
        name: str,
        wanted: Callable[..., bool],
        parts: Callable[[], Sequence[object]],
        tensors: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self._function, self._name, self._wanted = function, name, wanted
        self._parts, self._tensors = parts, tensors
        self.active: bool | None = None
        """Whether calls are recorded, once that is known."""
        self._begun: tuple[Sequence[object], tuple[int, ...]] | None = None
        self._beginnings = 0
        self._arguments: _Arguments | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        if self.active is False:
            return self._plain(*arguments)
        if not self._goes_on():
            result = self._plain(*arguments)
            if self.active is None:
                self.active = self._wanted(*arguments)
            return result
        if self._arguments is None and not self._try_to_record(arguments):
            return self._plain(*arguments)
        own = self._arguments
        if own is None or not own.fit(arguments):
            return self._plain(*arguments)
        own.take(arguments)
        return self._replay()

    def _goes_on(self) -> bool:
        """Whether everything is as it was at the last call."""
        parts, addresses = self._parts(), data_pointers(self._tensors())
        if self._begun is not None:
            known, places = self._begun
            if len(known) == len(parts) and all(map(is_, known, parts)) and places == addresses:
                return True
        self._begun, self._arguments = (parts, addresses), None
        self._forget()
        self._beginnings += 1
        if self._beginnings > _MOST_BEGINNINGS:
            self._give_up("what it is made of changes again and again")
        return False

    def _try_to_record(self, arguments: Sequence[Any]) -> bool:
        own = _Arguments(arguments)
        try:
            # Before there is a recording: the two need not fit into memory together.
            expected = self._computed(own.values)
            self._record(own.values)
            # A function that draws numbers does not agree with itself either.
            if not all_are_close(self._replayed(), expected, tolerance=0.01) and all_are_close(
                self._computed(own.values), expected, tolerance=0.01
            ):
                raise RuntimeError("a replay computes something else than the function")
        except Exception as error:  # whatever a driver or a kernel does not allow
            self._forget()
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return False
        self._arguments = own
        return True

    def _give_up(self, reason: str) -> None:
        self.active = False
        warnings.warn(
            f"{self._name} cannot be recorded as CUDA graphs, and kernels are launched one by one, "
            f"with the same results: {reason}",
            stacklevel=5,
        )

    def _plain(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def _forget(self) -> None:
        """Let go of the graphs, and with them of their memory."""
        self._graph: RecordedGraph[Sequence[Tensor]] | None = None

    def _record(self, arguments: Sequence[Any]) -> None:
        device = next(each.device for each in arguments if isinstance(each, Tensor))
        self._graph = RecordedGraph(lambda: self._function(*arguments), device=device)

    def _replay(self) -> Any:
        if self._graph is None:
            raise not_set_error("graph")
        self._graph.replay()
        return clone_all(self._graph.result)

    def _computed(self, arguments: Sequence[Any]) -> list[Tensor]:
        """All that matters about a call, by the function."""
        return list(self._function(*arguments))

    def _replayed(self) -> list[Tensor]:
        """The same by a replay."""
        return list(self._replay())


class RecordedPasses(Recorded):
    """Forward passes of a model that return the output and, if recorded, the backward pass."""

    def __init__(self, function: AnyFunction, enforcement: Enforcement, **options: Any) -> None:
        super().__init__(function, name="the model's passes", **options)
        self._enforcement = enforcement
        self._passes = 0

    def _plain(self, *arguments: Any) -> tuple[Any, None]:
        return self._function(*arguments), None

    def _forget(self) -> None:
        self._forward: RecordedGraph[Tensor] | None = None
        self._backward: RecordedGraph[Sequence[Tensor | None]] | None = None

    def _record(self, arguments: Sequence[Any]) -> None:
        # Where an earlier pass is still remembered, autograd would have this one wait for it.
        gc.collect()
        # What the forward pass keeps is given back in the course of the backward pass: in one pool,
        # the two take no more memory than they do unrecorded.
        pool, device = torch.cuda.graph_pool_handle(), self._enforcement.leaves[0].device
        forward = RecordedGraph(lambda: self._function(*arguments), device=device, pool=pool)
        self._cotangents = torch.zeros_like(forward.result, requires_grad=False)
        self._backward = RecordedGraph(
            lambda: self._enforcement.gradients(forward.result, self._cotangents),
            device=device,
            pool=pool,
        )
        forward.result = forward.result.detach()  # the graph behind it has done its work
        self._forward = forward

    def _replay(self) -> tuple[Tensor, BackwardPass]:
        if self._forward is None:
            raise not_set_error("forward")
        self._forward.replay()
        self._passes += 1
        output = self._forward.result.detach().clone()
        return output, functools.partial(self._run_backward, self._passes)

    def _computed(self, arguments: Sequence[Any]) -> list[Tensor]:
        output = self._function(*arguments)
        found = self._enforcement.gradients(output, _trial(output))
        return [output.detach(), *(each for each in found if each is not None)]

    def _replayed(self) -> list[Tensor]:
        output, backward = self._replay()
        return [output, *(each for each in backward(_trial(output)) if each is not None)]

    def _run_backward(self, number: int, cotangents: Tensor) -> list[Tensor | None]:
        if number != self._passes or self._backward is None:
            raise PrivacyError(
                "another batch went through the model before the backward pass of this one. "
                "Compiled as CUDA graphs, the model remembers one batch: call backward first, or "
                'compile with mode="default", which is without graphs.'
            )
        self._cotangents.copy_(cotangents)
        self._backward.replay()
        found = self._backward.result
        copies = iter(clone_all([each for each in found if each is not None]))
        return [None if each is None else next(copies) for each in found]


class _Arguments:
    """Arguments of a recorded call: tensors that are filled anew, and values that stay."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.values = [x.detach().clone() if isinstance(x, Tensor) else x for x in arguments]
        self._kinds = list(map(_kind, arguments))

    def fit(self, arguments: Sequence[Any]) -> bool:
        return list(map(_kind, arguments)) == self._kinds

    @torch.no_grad()
    def take(self, arguments: Sequence[Any]) -> None:
        for own, given in zip(self.values, arguments, strict=True):
            if isinstance(given, Tensor):
                own.copy_(given)


def _trial(output: Tensor) -> Tensor:
    """Cotangents to compare gradients by: of one sign, so that rows do not cancel."""
    trial = torch.linspace(0.5, 1.5, output.numel(), device=output.device)
    return trial.reshape(output.shape).to(output.dtype)


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
