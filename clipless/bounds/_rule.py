"""The rule table: what is known about each layer and each torch function.

A rule is a pure function. It receives a `CallSite` (where and with what the operation is called)
and the operation's own arguments with a `Signal` in place of every tensor, and returns a `Bound`.
Rules are looked up by exact type, or by the very function or tensor method: whatever has no rule
is refused, and no name means anything here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from clipless.errors import UnsupportedOperationError

LARGEST = 1e18
"""Norms and factors beyond it are refused: their squares leave the range of float32."""


@dataclass(frozen=True)
class Signal:
    """A bound of one example's tensor: its shape without the batch axis, and its norm."""

    norm: float
    """An upper bound of the Euclidean norm over the whole tensor of one example."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def is_bounded(self) -> bool:
        """Whether the norm is known to be finite, that is: whether an input guard came before."""
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class Product:
    """A product with a matrix, whose operands are rounded to TF32 or bfloat16.

    Rounding moves each entry by at most u of itself, so the norm l of a matrix grows to at most
    `(1 + u sqrt(rank)) l`.
    """

    rank: float
    """Any r for which the matrix has a Frobenius norm of at most sqrt(r) l: its rank, for one."""
    terms: int
    """How many numbers are added up for one entry, forward or backward, whichever are more."""
    certified: bool = False
    """Whether training keeps the norm of the weight as bfloat16 rounds it within one unit of its
    constraint. It does for this library's spectral layers."""


@dataclass(frozen=True)
class Bound:
    """What a rule proves of one operation, for every example.

    `lipschitz` bounds the norm of the Jacobian with respect to each tensor argument: one number
    for all of them, or one for each. `output` bounds the norm of the result. `parameters` bounds
    the norm of the Jacobian with respect to each of the module's own parameters, by name.
    `cotangent_cap` bounds what a backward pass hands on, whatever it received, and
    `parameter_caps` what it gives to a parameter.

    `roundings` says what lower precision does. A number: the operation takes no products of
    matrices (it is exact in TF32), and in bfloat16 rounds its result, or the cotangent that it
    hands on, at most so many times, whichever is worse; `math.inf` if nobody has counted. A
    `Product`: it is a product with a matrix. None: nothing is known, and only float32 is accepted.

    `forward_roundings` says how many roundings meet in one entry of the result when the forward
    pass is computed in one precision throughout: n and a few for a sum of n terms, 0 for what only
    moves or selects entries. None: 0 where `roundings` is 0, the terms of a `Product`, and
    otherwise as many as there are entries in the inputs. Robustness certificates rest on it.

    `rows_apart` states that no example has a part in another's result or gradient: a rule without
    it is refused, and it is tried on random examples.
    """

    lipschitz: float | tuple[float, ...]
    output: float
    parameters: Mapping[str, float] = field(default_factory=dict)
    cotangent_cap: float = math.inf
    parameter_caps: Mapping[str, float] = field(default_factory=dict)
    roundings: float | Product | None = None
    forward_roundings: int | None = None
    rows_apart: bool = False


@dataclass(frozen=True)
class CallSite:
    """One call of one operation in a traced model, as its rule sees it."""

    where: str
    """The path of the module, or the function with the module and source line that call it."""
    output_shape: tuple[int, ...]
    """Shape of one example's result (of the first, if there are several)."""
    target: Any = None
    """The module's type, the function or the tensor method: what the rule was found by."""
    called: nn.Module | None = None

    @property
    def operation(self) -> str:
        """The name of the module's type, or of the function, for readers."""
        return getattr(self.target, "__name__", None) or repr(self.target)

    @property
    def module(self) -> Any:
        """The module called. Only rules of modules may ask."""
        if self.called is None:
            self.refuse("its rule asks for a module, and this is a function.")
        return self.called

    @property
    def output_size(self) -> int:
        """Number of entries of one example's result."""
        return math.prod(self.output_shape)

    def refuse(self, reason: str) -> NoReturn:
        """Refuse this call: no sensitivity can be proved."""
        raise UnsupportedOperationError(f"{self.where}: {reason}")

    def own_axes(self, axes: int | tuple[int, ...], signal: Signal) -> tuple[int, ...]:
        """Return axes of the batched tensor as axes of the example, refusing the batch axis."""
        rank = len(signal.shape) + 1
        wanted = (axes,) if isinstance(axes, int) else tuple(axes)
        normal = tuple(axis % rank for axis in wanted)
        if 0 in normal:
            self.refuse(
                "it works along the batch axis, which would let one example touch the gradient of "
                "another. Name an axis of the example itself."
            )
        return tuple(axis - 1 for axis in normal)


Rule = Callable[..., Bound]
Target = type[nn.Module] | Callable[..., Any]

_RULES: dict[Target, Rule] = {}


def register(*targets: Target) -> Callable[[Rule], Rule]:
    """Register a rule for module types, functions, or tensor methods such as `torch.Tensor.relu`.

    The rule receives a `CallSite` and then the arguments of the module's `forward` (or of the
    function) with a `Signal` for every tensor. It must return upper bounds: whoever registers a
    rule vouches for it. Rules hold for the exact type only, never for subclasses.

    Example:
        >>> class Negate(torch.nn.Module):
        ...     def forward(self, x):
        ...         return -x
        >>> @register(Negate)
        ... def negate(site, x):
        ...     return Bound(lipschitz=1.0, output=x.norm, roundings=0, rows_apart=True)
    """
    for target in targets:
        if isinstance(target, str):
            raise TypeError(
                f"a rule belongs to an operation and not to its name {target!r}: pass the type of "
                "the module, the function, or the method itself, such as torch.Tensor.relu"
            )
        if target in _RULES:
            raise ValueError(f"{target!r} already has a rule: {_RULES[target].__qualname__}")

    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


def unregister(*targets: Target) -> None:
    """Remove rules, for example one registered by mistake."""
    for target in targets:
        del _RULES[target]


def find_rule(target: Target) -> Rule | None:
    """Return the rule for exactly this type, function or method."""
    try:
        return _RULES.get(target)
    except TypeError:  # an unhashable callable has no rule
        return None


def registered_types() -> tuple[type[nn.Module], ...]:
    """All module types that have a rule."""
    return tuple(
        target for target in _RULES if isinstance(target, type) and issubclass(target, nn.Module)
    )


def scaling(
    site: CallSite,
    x: Signal,
    factor: float,
    *,
    roundings: float,
    forward_roundings: int | None = None,
) -> Bound:
    """Return l = factor, output factor X: the bound of much that maps zero to zero."""
    if not factor <= LARGEST:
        site.refuse(f"the factor {factor:g} is not finite, or so large that float32 overflows.")
    return Bound(
        lipschitz=factor,
        output=factor * x.norm,
        roundings=roundings,
        forward_roundings=forward_roundings,
        rows_apart=True,
    )
