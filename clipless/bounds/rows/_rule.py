"""The table of rules about rows: for an operator, where the examples are in its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from clipless.bounds._refusal import innermost_own_line
from clipless.bounds.rows._layout import Rows
from clipless.errors import UnsupportedOperationError

Layout = Rows | None
RowRule = Callable[["RowCall"], Layout | Sequence[Layout]]
"""Returns where the examples are in an operator's result, or in each of several; else refuses."""

_RULES: dict[OpOverloadPacket, RowRule] = {}
_POINTWISE: list[RowRule] = []
"""The rule of every operator that torch itself marks as pointwise, unless it has its own."""


@dataclass(frozen=True)
class RowCall:
    """One call of an operator: what went in, what came out, and where the examples are."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    output: Any
    batch: int
    find: Callable[[Any], Layout]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument, however it was given."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def rows(self, value: Any) -> Layout:
        """Return where the examples are in an argument; None if it holds nothing of them."""
        return self.find(value) if isinstance(value, Tensor) else None

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, those in lists too."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            parts = value if isinstance(value, list | tuple) else (value,)
            found += [each for each in parts if isinstance(each, Tensor)]
        return found

    def only(self, *allowed: Any) -> None:
        """Refuse examples in any argument but these."""
        kept = {id(each) for each in allowed}
        if any(self.rows(each) is not None for each in self.tensors() if id(each) not in kept):
            self.refuse("an argument that should be the same for all examples depends on them")

    def agreed(self, layouts: Sequence[Layout]) -> Rows:
        """Return the one place where the examples are in these, leaving out what has none."""
        found = {each for each in layouts if each is not None}
        if len(found) != 1:
            self.refuse("examples on different axes of its arguments meet")
        return found.pop()

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the model: examples would not stay apart."""
        raise advised(f"{self.name}{place_in_code()}: {reason}")


_ADVICE = (
    "Under differential privacy each example must be computed from that example alone: reduce, "
    "reshape and combine only the example's own axes."
)


def advised(reason: str) -> UnsupportedOperationError:
    """Return the refusal of a model, with what it should do instead."""
    return UnsupportedOperationError(f"{reason}. {_ADVICE}")


def place_in_code() -> str:
    """Return the innermost line of the model's own code, in brackets."""
    import sys

    line = innermost_own_line(sys._getframe(1))
    return f" ({line})" if line else ""


def register_rows(*operators: OpOverloadPacket | str) -> Callable[[RowRule], RowRule]:
    """Register the rule of operators: `torch.ops.aten.mm`, or `"aten.mm"` if a release may lack it.

    The rule gets a `RowCall` and returns `Rows(axis)` for its result, or one for each of several
    results; None says that a result does not depend on any example. It is a claim that the operator
    keeps examples apart, on which the guarantee then rests.

    Example:
        >>> from clipless.bounds import register_rows, unregister_rows
        >>> @register_rows(torch.ops.aten.linalg_matrix_exp)
        ... def one_by_one(call):
        ...     return call.rows(call.args[0])
        >>> unregister_rows(torch.ops.aten.linalg_matrix_exp)
    """

    def decorate(rule: RowRule) -> RowRule:
        for operator in filter(None, map(_packet, operators)):
            if operator in _RULES:
                raise ValueError(f"{operator} has a rule about its rows already")
            _RULES[operator] = rule
        return rule

    return decorate


def register_pointwise_rows(rule: RowRule) -> RowRule:
    """Register the rule of all operators that torch marks as pointwise and that have no other."""
    _POINTWISE[:] = [rule]
    return rule


def unregister_rows(*operators: OpOverloadPacket | str) -> None:
    """Take the rules of operators out of the table."""
    for operator in filter(None, map(_packet, operators)):
        _RULES.pop(operator, None)


def find_row_rule(operator: OpOverload) -> RowRule:
    """Return the rule of an operator, or refuse it by name."""
    packet = operator.overloadpacket
    name = name_of(operator)
    rule = _RULES.get(packet)
    if rule is None and name.endswith("_"):  # the operator that writes into its argument
        changed = _packet(name.removesuffix("_"))
        rule = None if changed is None else _RULES.get(changed)
    if rule is None and torch.Tag.pointwise in operator.tags:
        (rule,) = _POINTWISE
    if rule is None:
        raise UnsupportedOperationError(
            f"{name}{place_in_code()}: there is no rule about its rows, so it is not known whether "
            "it keeps examples apart. Compute this part without it, or, if its result for an "
            "example depends on that example alone, say so:\n\n"
            f"    @clipless.bounds.register_rows(torch.ops.{name})\n"
            "    def my_rule(call):\n"
            "        return call.rows(call.args[0])  # where the examples are in the result\n"
        )
    return rule


def name_of(operator: OpOverload) -> str:
    """Return the name of an operator as it is written behind `torch.ops.`."""
    return operator.overloadpacket._qualified_op_name.replace("::", ".")


def _packet(operator: OpOverloadPacket | str) -> OpOverloadPacket | None:
    """Return the operator of a name; None if this release of torch has none."""
    if not isinstance(operator, str):
        return operator
    namespace, name = operator.split(".")
    found: OpOverloadPacket | None = getattr(getattr(torch.ops, namespace), name, None)
    return found
