"""Sorting of pairs and norms of windows as custom operators, for torch.compile.

Each is a formula with a backward pass by hand, from which the compiler makes kernels. Whoever wants
to join a sort with the norms that are all it is for captures them as one operator each
(`as_operators`), and calls `join_sorted_norms` before the compiler looks into the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from clipless.kernels._dispatch import TRACING_LOCK
from clipless.kernels.layers._compiled_sorting import leading, members, traced_sort
from clipless.kernels.layers._window_norms import WindowNorms, finish, quotient, wide

_LAYOUTS = (torch.contiguous_format, torch.channels_last)
_WINDOWS = "int[] kernel, int[] stride, int[] padding, int multiplicity"
_LIBRARY = torch.library.Library("clipless", "DEF")
_LIBRARY.define("sort_pairs(Tensor x, int dim, bool descending) -> Tensor")
_LIBRARY.define(f"window_norms(Tensor x, {_WINDOWS}) -> Tensor")
_LIBRARY.define(f"sorted_window_norms(Tensor x, bool descending, {_WINDOWS}) -> Tensor")
_LIBRARY.define("laid_out_like(Tensor x, Tensor other) -> Tensor")


_operators = False  # a variable that compilers can watch


@contextmanager
def as_operators(wanted: bool) -> Iterator[None]:
    """Trace sorts and norms as custom operators within a `with` block.

    Not by default: exported programs, for one, are to run where this library is not.
    """
    global _operators
    with TRACING_LOCK:
        before, _operators = _operators, wanted
        try:
            yield
        finally:
            _operators = before


def sorted_pairs(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Sort consecutive pairs along `dim`."""
    sort = torch.ops.clipless.sort_pairs if _operators else traced_sort
    ordered: Tensor = sort(x, dim % x.ndim, descending)
    return ordered


def window_norms(x: Tensor, windows: WindowNorms) -> Tensor:
    """The Euclidean norms of windows."""
    function = torch.ops.clipless.window_norms if _operators else _norms
    norms: Tensor = function(
        x, windows.kernel, windows.stride, windows.padding, windows.multiplicity
    )
    return norms


def join_sorted_norms(graph: fx.Graph) -> int:
    """Fuse each sort of channels that only feeds norms with those norms, in a graph.

    Sorted values are then never written: the backward pass sorts again. Returns how many there are.
    """
    operators = torch.ops.clipless
    joined = 0
    for norms in graph.find_nodes(op="call_function", target=operators.window_norms):
        ordered, *windows = norms.args
        if not (
            ordered.target is operators.sort_pairs
            and len(ordered.users) == 1
            and ordered.args[1] == 1
            and _windows(*windows).tiles
            and _alike(ordered.args[0], ordered, norms)
        ):
            continue
        x, _, descending = ordered.args
        with graph.inserting_before(ordered):  # x may be changed in place after it was sorted
            both = graph.call_function(operators.sorted_window_norms, (x, descending, *windows))
        both.meta.update(norms.meta)
        norms.replace_all_uses_with(both)
        graph.erase_node(norms)
        graph.erase_node(ordered)
        joined += 1
    return joined


def _alike(*nodes: fx.Node) -> bool:
    """Whether gradients flow through all of them, or through none."""
    return len({node.meta["example_value"].requires_grad for node in nodes}) == 1


class _TracedNorms(torch.autograd.Function):
    """Left to themselves, compilers would keep the squares as well."""

    @staticmethod
    def forward(x: Tensor, windows: WindowNorms) -> Tensor:
        return windows.averages(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.windows = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (cotangent,) = cotangents
        x, norms = ctx.saved_tensors
        cotangent = _laid_out_like(cotangent, norms)
        windows: WindowNorms = ctx.windows
        if not windows.tiles:
            return windows.averages_backward(x, norms, cotangent), None
        return (x * windows.spread(quotient(cotangent, norms), x)).to(x.dtype), None


class _SortedNorms(torch.autograd.Function):
    """Norms, over windows that tile an image, of its sorted channels, which are never written.

    A value x that was sorted into a place with norm y and cotangent g has the gradient x g / y.
    """

    @staticmethod
    def forward(x: Tensor, descending: bool, windows: WindowNorms) -> Tensor:
        first, second = members(wide(x), 1)
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        if descending:
            low, high = high, low
        ordered = torch.where(leading(x, 1), low, high)
        rows, columns = windows.lines(x)
        # Entry by entry: a pooling operator would have its input written first.
        squares = [ordered[:, :, row, column].square() for row in rows for column in columns]
        return finish(functools.reduce(torch.add, squares) / windows.multiplicity, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.descending, ctx.windows = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (cotangent,) = cotangents
        x, norms = ctx.saved_tensors
        cotangent = _laid_out_like(cotangent, norms)
        windows: WindowNorms = ctx.windows
        first, second = members(wide(x), 1)
        # By a difference: compilers never do again what turns two tensors into few bytes.
        swapped = (second - first if ctx.descending else first - second) > 0
        to_first = swapped ^ leading(x, 1)

        def where_it_went(values: Tensor) -> Tensor:
            one, other = (windows.spread(each, x) for each in members(values, 1))
            return torch.where(to_first, one, other)

        share = quotient(where_it_went(cotangent), where_it_went(norms))
        return (x * share).to(x.dtype), None, None


def _laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """`x` as `other` lies in memory, by a copy of its own if there is a difference.

    Behind a layer that flattens images, cotangents lie channel by channel. Kernels that read them
    so from every pixel of a window take three times as long as with a copy made before. What is
    one value for many entries, or has gaps, is no layout to be changed. (While a graph is captured
    nobody knows the layout of cotangents; inside operators they are known.)
    """
    if torch.compiler.is_dynamo_compiling():
        return x
    of_x, of_other = (
        {layout for layout in _LAYOUTS if each.is_contiguous(memory_format=layout)}
        for each in (x, other)
    )
    if not of_x or not of_other or of_x & of_other:
        return x
    copy: Tensor = torch.ops.clipless.laid_out_like(x, other)
    return copy


def _windows(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], multiplicity: int
) -> WindowNorms:
    return WindowNorms(tuple(kernel), tuple(stride), tuple(padding), multiplicity)  # type: ignore[arg-type]


def _norms(x: Tensor, *windows: Any) -> Tensor:
    norms: Tensor = _TracedNorms.apply(x, _windows(*windows))  # type: ignore[no-untyped-call]
    return norms


def _sorted_norms(x: Tensor, descending: bool, *windows: Any) -> Tensor:
    norms: Tensor = _SortedNorms.apply(x, descending, _windows(*windows))  # type: ignore[no-untyped-call]
    return norms


def _copy_like(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(other, dtype=x.dtype).copy_(x)


for _name, _formula in (
    ("sort_pairs", traced_sort), ("window_norms", _norms), ("sorted_window_norms", _sorted_norms),
):  # fmt: skip
    # "Implicit": made of other operators, which is what compilers see once they look inside.
    _LIBRARY.impl(_name, _formula, "CompositeImplicitAutograd")
# "Explicit": itself an operator to them, which is not fused with what reads the copy.
_LIBRARY.impl("laid_out_like", _copy_like, "CompositeExplicitAutograd")
