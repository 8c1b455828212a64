"""The rule table: what is known about each layer and each torch function.

A rule is a pure function. It receives a `Site` (where and with what the operation is called) and
the operation's own arguments with a `Signal` in place of every tensor, and returns a `Bound`. Rules
are looked up by exact type or by the very function: whatever has no rule is refused.
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
    """What is known of one example's tensor: its shape without the batch axis, and its norm."""

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
class Bound:
    """What a rule proves of one operation, for every example.

    `lipschitz` bounds the norm of the Jacobian with respect to each tensor argument: one number
    for all of them, or one for each. `output` bounds the norm of the result. `parameters` bounds
    the norm of the Jacobian with respect to each of the module's own parameters, by name.
    `cotangent_cap` bounds what a backward pass hands on, whatever it received, and
    `parameter_caps` what it gives to a parameter.
    """

    lipschitz: float | tuple[float, ...]
    output: float
    parameters: Mapping[str, float] = field(default_factory=dict)
    cotangent_cap: float = math.inf
    parameter_caps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """One call of one operation in a traced model."""

    where: str
    """The path of the module, or the function with the module and source line that call it."""
    output_shape: tuple[int, ...]
    """Shape of one example's result (of the first, if there are several)."""
    operation: str = ""
    """The name of the module's type, or of the function."""
    called: nn.Module | None = None

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
Target = type[nn.Module] | Callable[..., Any] | str

_RULES: dict[Target, Rule] = {}


def register(*targets: Target) -> Callable[[Rule], Rule]:
    """Register a rule for module types, torch functions, or names of tensor methods.

    The rule receives a `Site` and then the arguments of the module's `forward` (or of the
    function) with a `Signal` for every tensor. It must return upper bounds: whoever registers a
    rule vouches for it. Rules hold for the exact type only, never for subclasses.

    Example:
        >>> class Negate(torch.nn.Module):
        ...     def forward(self, x):
        ...         return -x
        >>> @register(Negate)
        ... def negate(site, x):
        ...     return Bound(lipschitz=1.0, output=x.norm)
    """
    for target in targets:
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
    """Return the rule for exactly this type, function or method name."""
    try:
        return _RULES.get(target)
    except TypeError:  # an unhashable callable has no rule
        return None


def registered_types() -> tuple[type[nn.Module], ...]:
    """All module types that have a rule."""
    return tuple(
        target for target in _RULES if isinstance(target, type) and issubclass(target, nn.Module)
    )
