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
_MOST_KINDS = 8
"""For how many kinds of arguments there may be recordings: all sizes of padded batches."""
Replay = Callable[[], Any]


class Recorded:
    """A function of tensors, recorded at its second call and replayed from then on.

    The first call is left alone: it compiles, and loads what can be loaded only once. Then
    `wanted(*arguments)` is asked whether to record at all. Arguments of other shapes have a first
    call, and a recording, of their own. `parts()` lists what the function was compiled from, and
    `tensors()` what it reads besides its arguments: where these are other objects, or have moved,
    it begins anew.
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
        self._over = False
        self._begun: tuple[Sequence[object], tuple[int, ...]] | None = None
        self._beginnings = 0
        self._kinds: list[_Kind] = []
        self._pool: Any = None

    @property
    def active(self) -> bool:
        """Whether calls are recorded, of arguments that came before."""
        return not self._over and any(kind.wanted for kind in self._kinds)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        if self._over:
            return self._plain(*arguments)
        self._begin_if_changed()
        kind = next((each for each in self._kinds if each.fits(arguments)), None)
        if kind is None:
            result = self._plain(*arguments)
            if not self._over and len(self._kinds) < _MOST_KINDS:
                self._kinds.append(_Kind(arguments, wanted=self._wanted(*arguments)))
            return result
        if not kind.wanted or (kind.replay is None and not self._try_to_record(kind, arguments)):
            return self._plain(*arguments)
        kind.take(arguments)
        return self._replayed(kind)

    def _begin_if_changed(self) -> None:
        """Forget everything unless all is as it was at the last call."""
        parts, addresses = self._parts(), data_pointers(self._tensors())
        if self._begun is not None:
            known, places = self._begun
            if len(known) == len(parts) and all(map(is_, known, parts)) and places == addresses:
                return
        self._begun = (parts, addresses)
        self._kinds.clear()
        self._forget()
        self._beginnings += 1
        if self._beginnings > _MOST_BEGINNINGS:
            self._give_up("what it is made of changes again and again")

    def _try_to_record(self, kind: _Kind, arguments: Sequence[Any]) -> bool:
        # Recordings share their memory. A larger one would not fit into that of smaller ones, but
        # they fit into its own: the largest is recorded first, and they once more.
        recorded = [each.numbers for each in self._kinds if each.replay is not None]
        if recorded and kind.numbers > max(recorded):
            self._forget()
        kind.fill(arguments)
        try:
            # Before there is a recording: the two need not fit into memory together.
            expected = self._computed(kind.values)
            kind.replay = self._record(kind.values)
            # A function that draws numbers does not agree with itself either.
            if not all_are_close(self._compared(kind), expected, tolerance=0.01) and all_are_close(
                self._computed(kind.values), expected, tolerance=0.01
            ):
                raise RuntimeError("a replay computes something else than the function")
        except Exception as error:  # whatever a driver or a kernel does not allow
            self._forget()
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return False
        return True

    def _give_up(self, reason: str) -> None:
        self._over = True
        warnings.warn(
            f"{self._name} cannot be recorded as CUDA graphs, and kernels are launched one by one, "
            f"with the same results: {reason}",
            stacklevel=5,
        )

    def _plain(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def _forget(self) -> None:
        """Let go of the graphs, and with them of their memory."""
        for kind in self._kinds:
            kind.replay = None
        self._pool = None

    def _shared_pool(self) -> Any:
        """The memory of all recordings of this function, no two of which are replayed at a time.

        Results are copied out of it at once, so that none is left when another is replayed.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _record(self, arguments: Sequence[Any]) -> Replay:
        device = next(each.device for each in arguments if isinstance(each, Tensor))
        graph = RecordedGraph(
            lambda: self._function(*arguments), device=device, pool=self._shared_pool()
        )

        def replay() -> Any:
            graph.replay()
            return clone_all(graph.result)

        return replay

    def _replayed(self, kind: _Kind) -> Any:
        if kind.replay is None:
            raise not_set_error("the recording")
        return kind.replay()

    def _computed(self, arguments: Sequence[Any]) -> list[Tensor]:
        """All that matters about a call, by the function."""
        return list(self._function(*arguments))

    def _compared(self, kind: _Kind) -> list[Tensor]:
        """The same by a replay."""
        return list(self._replayed(kind))


class RecordedPasses(Recorded):
    """Forward passes of a model that return the output and, if recorded, the backward pass."""

    def __init__(self, function: AnyFunction, enforcement: Enforcement, **options: Any) -> None:
        super().__init__(function, name="the model's passes", **options)
        self._enforcement = enforcement
        self._passes = 0

    def _plain(self, *arguments: Any) -> tuple[Any, None]:
        return self._function(*arguments), None

    def _record(self, arguments: Sequence[Any]) -> Replay:
        # Where an earlier pass is still remembered, autograd would have this one wait for it.
        gc.collect()
        # What the forward pass keeps is given back in the course of the backward pass: in one pool,
        # the two take no more memory than they do unrecorded.
        pool, device = self._shared_pool(), self._enforcement.leaves[0].device
        forward = RecordedGraph(lambda: self._function(*arguments), device=device, pool=pool)
        cotangents = torch.zeros_like(forward.result, requires_grad=False)
        backward: RecordedGraph[list[Tensor | None]] = RecordedGraph(
            lambda: self._enforcement.gradients(forward.result, cotangents),
            device=device,
            pool=pool,
        )
        forward.result = forward.result.detach()  # the graph behind it has done its work

        def run_backward(number: int, given: Tensor) -> list[Tensor | None]:
            self._check_remembered(number)
            cotangents.copy_(given)
            backward.replay()
            copies = iter(clone_all([each for each in backward.result if each is not None]))
            return [None if each is None else next(copies) for each in backward.result]

        def replay() -> tuple[Tensor, BackwardPass]:
            forward.replay()
            self._passes += 1
            output = forward.result.detach().clone()
            return output, functools.partial(run_backward, self._passes)

        return replay

    def _computed(self, arguments: Sequence[Any]) -> list[Tensor]:
        output = self._function(*arguments)
        found = self._enforcement.gradients(output, _trial(output))
        return [output.detach(), *(each for each in found if each is not None)]

    def _compared(self, kind: _Kind) -> list[Tensor]:
        output, backward = self._replayed(kind)
        return [output, *(each for each in backward(_trial(output)) if each is not None)]

    def _check_remembered(self, number: int) -> None:
        if number != self._passes:
            raise PrivacyError(
                "another batch went through the model before the backward pass of this one. "
                "Compiled as CUDA graphs, the model remembers one batch: call backward first, or "
                'compile with mode="default", which is without graphs.'
            )


class _Kind:
    """Arguments of certain shapes: tensors that are filled anew, values that stay, a recording."""

    def __init__(self, arguments: Sequence[Any], *, wanted: bool) -> None:
        self.wanted = wanted
        """Whether calls with these arguments are to be recorded."""
        self.replay: Replay | None = None
        self.values: list[Any] = []
        """The tensors that the recording reads, and the values it was made with."""
        self.numbers = sum(each.numel() for each in arguments if isinstance(each, Tensor))
        self._kinds = list(map(_kind, arguments))

    def fits(self, arguments: Sequence[Any]) -> bool:
        return list(map(_kind, arguments)) == self._kinds

    def fill(self, arguments: Sequence[Any]) -> None:
        """Make tensors for the recording, which hold these arguments."""
        self.values = [x.detach().clone() if isinstance(x, Tensor) else x for x in arguments]

    @torch.no_grad()
    def take(self, arguments: Sequence[Any]) -> None:
        """Fill the tensors anew."""
        for own, given in zip(self.values, arguments, strict=True):
            if isinstance(given, Tensor):
                own.copy_(given)


def _trial(output: Tensor) -> Tensor:
    """Cotangents to compare gradients by: of one sign, so that rows do not cancel."""
    trial = torch.linspace(0.5, 1.5, output.numel(), device=output.device)
    return trial.reshape(output.shape).to(output.dtype)


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
