"""What a pass computes besides following examples, so that passes of two batches can be compared.

An example's result must not depend on how many others there are, nor on its place among them: a
sample with the example and one without it differ in both. So whatever meets the examples has to be
the same for all of them, and the same in a batch of another size: numbers (`x / len(x)`), and
tensors that hold nothing of any example (`x + table[: len(x)]`). What is drawn at random may differ
from example to example: it has the same distribution for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import RowCall, advised
from clipless.errors import UnsupportedOperationError

Digest = tuple[Any, ...]

_SIZED = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "flatten", "unflatten",
    "expand", "repeat", "slice", "slice_copy", "split", "split_with_sizes", "narrow",
    "native_group_norm",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided",
}  # fmt: skip
"""Operators that are given sizes, in which the batch may be."""

_OVERWRITTEN = {"copy": 0, "fill": 0, "zero": 0, "bernoulli": 0, "rrelu_with_noise": 1}
"""Which argument of an operator is written, and not read."""


@dataclass(frozen=True)
class Constant:
    """A tensor that holds nothing of any example, where it meets them."""

    whole: Digest
    each: Digest | None
    """What every example meets of it; None if that is not the same for all."""

    def same_for_all(self, other: Constant) -> bool:
        """Whether it is the same for every example, in both of two passes."""
        if self.each is not None and other.each is not None and _close(self.each, other.each):
            return True
        return _close(self.whole, other.whole)


@dataclass(frozen=True)
class TracedCall:
    """One operator that was executed on what depends on examples."""

    name: str
    place: str
    """The line of the model's own code."""
    numbers: tuple[float | complex | None, ...]
    constants: tuple[Constant, ...]
    results: tuple[tuple[Rows, tuple[int, ...]], ...] = ()
    """Where the examples are in the results, and the rest of their shapes."""


def numbers_in(values: Any) -> Iterator[float | complex | None]:
    """Yield the numbers among arguments, None in place of what is none."""
    for value in values:
        if isinstance(value, int | float | complex):
            yield value
        elif isinstance(value, list | tuple):
            yield from numbers_in(value)
            yield None
        else:
            yield None


def constants_of(call: RowCall, drawn: Callable[[Tensor], bool]) -> tuple[Constant, ...]:
    """Return what meets the examples in a call and holds nothing of them, nor of chance."""
    name = call.name.removeprefix("aten.").removesuffix("_")
    given = list(call.args)
    if name in _OVERWRITTEN:
        given[_OVERWRITTEN[name]] = None
    own = _own_index(call) if name in ("index", "_unsafe_index") else None
    named = [value for key, value in call.kwargs.items() if key != "out"]
    sizes = {
        (rows.outer, rows.inner) for each in call.tensors() if (rows := call.rows(each)) is not None
    }
    return tuple(
        _constant(each, call.batch, sizes)
        for each in _tensors((*given, *named))
        if each is not own and call.rows(each) is None and not drawn(each)
    )


def compare_passes(first: Sequence[TracedCall], second: Sequence[TracedCall],
                   batches: tuple[int, int]) -> None:  # fmt: skip
    """Refuse a model that does something else in a batch of another size."""
    if [each.name for each in first] != [each.name for each in second]:
        raise UnsupportedOperationError(
            "the model does something else in a batch of another size: its examples would depend "
            "on how many others there are. Write its forward without looking at the batch's size."
        )
    for one, other in zip(first, second, strict=True):
        where = f"{one.name}{one.place}"
        if one.results != other.results or not _same_numbers(one, other, batches):
            raise advised(
                f"{where}: a number or a shape is another one in another pass, in a batch of "
                f"{batches[0]} and of {batches[1]} examples. What an example becomes must not "
                "depend on how many others there are (`x / len(x)`); numbers that follow a "
                "schedule are set outside of forward"
            )
        pairs = zip(one.constants, other.constants, strict=True)
        if not all(a.same_for_all(b) for a, b in pairs):
            raise advised(
                f"{where}: a tensor that meets the examples is another one for each place in the "
                "batch, or in batches of another size (`x + table[: len(x)]`, `torch.arange("
                "len(x))`): without one example, all that come after it would be others. If the "
                "first axis of the model's input counts positions, let it count examples"
            )


def _same_numbers(one: TracedCall, other: TracedCall, batches: tuple[int, int]) -> bool:
    sized = one.name.removeprefix("aten.").removesuffix("_") in _SIZED
    return len(one.numbers) == len(other.numbers) and all(
        a == b or (sized and _proportional(a, b, batches)) or (a != a and b != b)
        for a, b in zip(one.numbers, other.numbers, strict=True)
    )


def _proportional(a: Any, b: Any, batches: tuple[int, int]) -> bool:
    whole = isinstance(a, int) and isinstance(b, int)
    return whole and a % batches[0] == 0 and a // batches[0] * batches[1] == b


def _own_index(call: RowCall) -> Any:
    """The index on the axis of the examples, which the operator's rule has looked at."""
    rows = call.rows(call.args[0])
    given = call.args[1]
    return None if rows is None or rows.axis >= len(given) else given[rows.axis]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _constant(x: Tensor, batch: int, sizes: set[tuple[int, int]]) -> Constant:
    """Describe a tensor; axes as long as that of the examples are taken to be theirs."""
    for axis, size in enumerate(x.shape):
        for outer, inner in sizes:
            if size == outer * batch * inner:
                rows = x.detach().movedim(axis, 0).unflatten(0, (outer, batch, inner))
                one = rows[:, :1]
                alike = (rows == one) | ((rows != rows) & (one != one))
                return Constant(_digest(x), _digest(one) if bool(alike.all()) else None)
    return Constant(_digest(x), None)


def _digest(x: Tensor) -> Digest:
    """Return the shape of a tensor and two sums, which tell it from others."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.device.type == "meta" or not x.numel():
        return (*x.shape,)
    sums = x.reshape(-1, x.shape[-1] if x.ndim else 1).sum(dim=1, dtype=torch.float64)
    if not bool(sums.isfinite().all()):
        x = torch.nan_to_num(x.double(), nan=0.7, posinf=1e3, neginf=-2e3)
        sums = x.reshape(len(sums), -1).sum(dim=1)
    weights = torch.arange(1, len(sums) + 1, device=x.device, dtype=torch.float64).cos()
    return (*x.shape, float(sums.sum()), float((sums * weights).sum()), float(sums.abs().sum()))


def _close(one: Digest, other: Digest) -> bool:
    if len(one) != len(other):
        return False
    size = max([1e-30, *(abs(each) for each in one[-1:]), *(abs(each) for each in other[-1:])])
    return all(
        a == b if isinstance(a, int) else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6 * size)
        for a, b in zip(one, other, strict=True)
    )
