"""One forward pass of a model whose layers have thresholds: planned first, then enforced.

While a pass runs, each layer with trainable parameters asks the pass to use them (`use`). A
planning pass notes each use, and where the examples are in what goes in; it runs under a
`RowTrace`, which proves that they stay apart. An enforcing pass expects the same uses. Each is
sealed and held to its threshold; one that was not planned gets no gradient, and one on other axes
is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import Rows, RowTrace
from clipless.errors import PrivacyError, UnsupportedOperationError
from clipless.kernels import Threshold, enforced_copies
from clipless.privacy.enforced._shared import Shared
from clipless.privacy.step._enforcement import Deliveries, sealed

Plain = Callable[..., Tensor]
Bounded = Callable[[Tensor, Sequence[Tensor | None], Sequence[Threshold | None]], Tensor]


@dataclass(frozen=True)
class PlannedUse:
    """Where the examples are in the input of one use of a parameter, and the rest of its shape."""

    rows: Rows | None
    """None where the input is the same for all examples."""
    shape: tuple[int, ...]
    """The input's shape, without the axis that counts examples."""


@dataclass(frozen=True)
class PlannedUses:
    """All that a pass does with parameters, as it was planned."""

    uses: Mapping[str, tuple[PlannedUse, ...]]
    """By the name of the parameter."""
    meetings: tuple[tuple[Any, ...], ...]
    """Where tensors that are the same for all meet the batch, in their order."""


class LayerPass:
    """A pass of a model: what planning and enforcing have in common."""

    batch: int

    def __init__(self, model: nn.Module) -> None:
        # Parameters of one name are one tensor; several names of one tensor are its first.
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}

    def refused(self, error: UnsupportedOperationError) -> None:
        """Note why a model is refused: operators such as `*` turn errors into others."""

    def use(
        self, parameters: Sequence[Tensor | None], x: Tensor, plain: Plain, bounded: Bounded,
        *, by_position: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return what a layer computes of x with parameters.

        `plain(x, *parameters)` computes it; `bounded(x, parameters, thresholds)` does so with the
        examples on the first axis, and holds their gradients to thresholds. `by_position`: whether
        all axes between the first and the last are positions, so that axes may be moved there.
        """
        raise NotImplementedError

    def copies(self, parameter: Tensor) -> Shared:
        """Return a parameter that stands by itself, once for every example."""
        raise NotImplementedError

    def is_batched(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor that meets a shared one depends on examples."""
        raise NotImplementedError

    def batch_axis(self, name: str, batched: Sequence[Tensor], ndim: int) -> int:
        """Return the axis that counts examples where a shared tensor meets the batch."""
        raise NotImplementedError

    def batch_among(
        self, wanted: Sequence[int], shape: Sequence[int], missing: int
    ) -> int | None:  # fmt: skip
        """Return the axis of `wanted` that is the batch, for an expansion of a shared tensor."""
        raise NotImplementedError


class PlanningPass(LayerPass):
    """Notes the uses of parameters in a pass that a `RowTrace` follows."""

    def __init__(
        self, model: nn.Module, batch: int, *, earlier: Sequence[PlanningPass] = ()
    ) -> None:
        super().__init__(model)
        self.batch = batch
        self.trace: RowTrace = RowTrace(batch, earlier=[each.trace for each in earlier])
        self._uses: defaultdict[str, list[PlannedUse]] = defaultdict(list)
        self._meetings: list[tuple[Any, ...]] = []

    def refused(self, error: UnsupportedOperationError) -> None:
        self.trace.refusal = self.trace.refusal or error

    @property
    def planned(self) -> PlannedUses:
        """What the pass has seen."""
        return PlannedUses({k: tuple(v) for k, v in self._uses.items()}, tuple(self._meetings))

    def use(
        self, parameters: Sequence[Tensor | None], x: Tensor, plain: Plain, bounded: Bounded,
        *, by_position: bool = True,
    ) -> Tensor:  # fmt: skip
        trained = [p for p in parameters if p is not None and id(p) in self.names]
        if isinstance(x, Shared):
            return Shared(self.use(parameters, x.copies, plain, bounded), self)
        if not trained:
            return plain(x, *parameters)
        rows = self.trace.rows(x)
        if rows is None and x.ndim and x.shape[0] == self.batch:
            rows = Rows(0)  # the same for all, and laid out along the batch already
        shape = tuple(
            size for axis, size in enumerate(x.shape) if rows is None or axis != rows.axis
        )
        for parameter in trained:
            self._uses[self.names[id(parameter)]].append(PlannedUse(rows, shape))
        if rows is None:
            everywhere = x.unsqueeze(0).repeat(self.batch, *[1] * x.ndim)
            self.trace.follow([everywhere])
            return Shared(plain(everywhere, *parameters), self)
        if not (by_position or (rows.first and rows.inner == 1)):
            raise UnsupportedOperationError(
                f"a layer with trainable parameters {self.names[id(trained[0])]} is used on an "
                f"input of shape {tuple(x.shape)} whose first axis does not count examples. Give "
                "it one entry of its first axis for each example."
            )
        return plain(x, *parameters)

    def copies(self, parameter: Tensor) -> Shared:
        self._uses[self.names[id(parameter)]].append(PlannedUse(None, ()))
        everywhere = parameter.unsqueeze(0).repeat(self.batch, *[1] * parameter.ndim)
        self.trace.follow([everywhere])
        return Shared(everywhere, self)

    def is_batched(self, name: str, tensor: Tensor) -> bool:
        batched = self.trace.rows(tensor) is not None
        self._meetings.append((name, "batched" if batched else "shared", tensor.ndim))
        return batched

    def batch_axis(self, name: str, batched: Sequence[Tensor], ndim: int) -> int:
        found = set[int]()
        for each in batched:
            rows = self.trace.rows(each)
            if rows is None or (rows.outer, rows.inner) != (1, 1):
                raise UnsupportedOperationError(
                    f"{name}: a parameter that stands by itself meets the batch where examples and "
                    "positions are on one axis. Combine them before they are flattened."
                )
            found.add(rows.axis + ndim - each.ndim)
        if len(found) != 1:
            raise UnsupportedOperationError(f"{name}: examples are on different axes")
        axis = found.pop()
        self._meetings.append((name, axis, ndim, _other_sizes(batched, axis, ndim)))
        return axis

    def batch_among(
        self, wanted: Sequence[int], shape: Sequence[int], missing: int
    ) -> int | None:  # fmt: skip
        sizes = [1] * missing + list(shape)
        grown = [a for a, (w, s) in enumerate(zip(wanted, sizes, strict=True)) if w != s]
        found = [a for a in grown if wanted[a] == self.batch]
        axis = found[0] if len(found) == 1 else None
        self._meetings.append(("over the batch", axis, len(wanted)))
        return axis


class EnforcingPass(LayerPass):
    """Expects the uses that were planned, and holds each example to its share of the threshold."""

    def __init__(
        self, model: nn.Module, planned: PlannedUses, *, limits: Mapping[str, Threshold],
        places: Mapping[int, int], batch: int, deliveries: Deliveries | None,
        names: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        if names is not None:  # of tensors that stand for the parameters
            self.names = dict(names)
        self.batch, self._planned, self._limits = batch, planned, limits
        self._places, self._deliveries = places, deliveries
        self._count: defaultdict[str, int] = defaultdict(int)
        self._met = 0

    def use(
        self, parameters: Sequence[Tensor | None], x: Tensor, plain: Plain, bounded: Bounded,
        *, by_position: bool = True,
    ) -> Tensor:  # fmt: skip
        if isinstance(x, Shared):
            return Shared(self.use(parameters, x.copies, plain, bounded), self)
        trained = [p for p in parameters if p is not None and id(p) in self.names]
        if not trained:
            return plain(x, *_detached(parameters))
        use = self._next(trained)
        if use is None or not torch.is_grad_enabled():
            return plain(x, *_detached(parameters))
        if use.rows is None:
            everywhere = x.unsqueeze(0).expand(self.batch, *x.shape)
            self._expect(use.shape == tuple(x.shape), x)
            return Shared(self._sealed(parameters, [everywhere], bounded), self)
        rows = use.rows
        shape = tuple(size for axis, size in enumerate(x.shape) if axis != rows.axis)
        whole = x.ndim > rows.axis and x.shape[rows.axis] == rows.outer * self.batch * rows.inner
        self._expect(whole and shape == use.shape, x)
        if rows == Rows(0):
            return self._sealed(parameters, [x], bounded)

        def moved(
            x: Tensor, own: Sequence[Tensor | None], thresholds: Sequence[Threshold | None]
        ) -> Tensor:
            first = x.movedim(rows.axis, 0).unflatten(0, (rows.outer, self.batch, rows.inner))
            output = bounded(first.movedim(1, 0), own, thresholds)
            return output.movedim(0, 1).flatten(0, 2).movedim(0, rows.axis)

        return self._sealed(parameters, [x], moved)

    def copies(self, parameter: Tensor) -> Shared:
        use = self._next([parameter])
        if use is None or not torch.is_grad_enabled():
            return Shared(parameter.detach().expand(self.batch, *parameter.shape), self)

        def bounded(
            like: Tensor, own: Sequence[Tensor | None], thresholds: Sequence[Threshold | None]
        ) -> Tensor:
            (leaf,), (threshold,) = own, thresholds
            if leaf is None:
                raise PrivacyError("a parameter that was planned to be trained is not there")
            return enforced_copies(leaf, self.batch, threshold, like.dtype)

        return Shared(self._sealed([parameter], [parameter.detach()], bounded), self)

    def is_batched(self, name: str, tensor: Tensor) -> bool:
        known, kind, ndim = self._meeting(name)[:3]
        if known != name or ndim != tensor.ndim:
            raise _other_meeting(name)
        return bool(kind == "batched")

    def batch_axis(self, name: str, batched: Sequence[Tensor], ndim: int) -> int:
        meeting = self._meeting(name)
        axis = int(meeting[1])
        if meeting != (name, axis, ndim, _other_sizes(batched, axis, ndim)) or any(
            each.shape[axis - ndim + each.ndim] != self.batch for each in batched
        ):
            raise _other_meeting(name)
        return axis

    def batch_among(
        self, wanted: Sequence[int], shape: Sequence[int], missing: int
    ) -> int | None:  # fmt: skip
        known, axis, ndim = self._meeting("over the batch")[:3]
        wrong = axis is not None and wanted[axis] != self.batch
        if known != "over the batch" or ndim != len(wanted) or wrong:
            raise _other_meeting("expand")
        return None if axis is None else int(axis)

    def _meeting(self, name: str) -> tuple[Any, ...]:
        place, self._met = self._met, self._met + 1
        if place >= len(self._planned.meetings):
            raise _other_meeting(name)
        found = self._planned.meetings[place]
        if len(found) < 3:
            raise _other_meeting(name)
        return found

    def _next(self, trained: Sequence[Tensor]) -> PlannedUse | None:
        """The plan of this use; None if it was not planned."""
        found = []
        for parameter in trained:
            name = self.names[id(parameter)]
            uses, number = self._planned.uses.get(name, ()), self._count[name]
            self._count[name] += 1
            found.append(uses[number] if number < len(uses) else None)
        if any(each is None or each != found[0] for each in found):
            return None
        return found[0]

    def _expect(self, right: bool, x: Tensor) -> None:
        if torch._C._are_functorch_transforms_active():
            raise PrivacyError(
                "a layer with trainable parameters was called inside of a function transform "
                "(torch.func.vmap, vjp, ...), which makes several uses of one, each with the "
                "bound of one. Call the layer itself."
            )
        if not right:
            raise PrivacyError(
                f"a layer with trainable parameters was called on a tensor of shape "
                f"{tuple(x.shape)}, in a batch of {self.batch} examples: when the model was traced "
                "its examples were on other axes. Give the model inputs of one shape, and let its "
                "forward do the same in every pass."
            )

    def _sealed(
        self, parameters: Sequence[Tensor | None], inputs: Sequence[Tensor], bounded: Bounded
    ) -> Tensor:
        if self._deliveries is None:
            raise PrivacyError("this pass has no gradients to hand in: it is over")
        trained = {
            self._places[id(p)]: p
            for p in parameters
            if p is not None and id(p) in self.names and self.names[id(p)] in self._limits
        }
        # In float64, as the sums over the examples that become their gradients.
        leaves = {place: p.detach().double().requires_grad_() for place, p in trained.items()}
        thresholds = [
            None if p is None or id(p) not in self.names else self._limits.get(self.names[id(p)])
            for p in parameters
        ]

        def layer(given: Sequence[Any], leaves: Mapping[int, Tensor]) -> Tensor:
            own = [
                p if p is None else leaves.get(self._places.get(id(p), -1), p.detach())
                for p in parameters
            ]
            return bounded(given[0], own, thresholds)

        return sealed(layer, leaves, inputs, self._deliveries)


def _detached(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.detach() for each in parameters]


def _other_sizes(batched: Sequence[Tensor], axis: int, ndim: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(s for place, s in enumerate(each.shape, start=ndim - each.ndim) if place != axis)
        for each in batched
    )


def _other_meeting(name: str) -> PrivacyError:
    return PrivacyError(
        f"{name}: a parameter that stands by itself is used otherwise than when the model was "
        "traced. Let the model's forward do the same in every pass, on inputs of one shape."
    )
