"""`ModelConfig`: the settings of a model, frozen and checked when made.

Values may come from Python, from TOML or from the JSON of a run folder, so types are checked as
well as ranges, and lists are taken for tuples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from clipless.common import require_positive


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings that all models share.

    Args:
        input_shape: shape of one example, without the batch axis.
        classes: number of outputs; 1 for a binary logit or a regression.
        input_norm: the norm of the input guard. By default a quarter of the largest norm that
            examples with entries in [0, 1] can have, `sqrt(n) / 4`, which most images exceed; on
            the sphere, 1.
        input_mode: `"clip"` projects examples onto the ball of that norm and keeps the model
            1-Lipschitz in its raw input; `"sphere"` brings all of them to exactly that norm, at
            the price of the Lipschitz constant. See `clipless.nn.BoundedInput`.
        constraint: the set that hidden weights live in, as in `clipless.nn.SpectralLinear`. The
            output layer is always in the ball: a small weight must be able to stay small.
        output_bias: radius of the ball of the output's bias; by default there is none. It does
            not change the Lipschitz constant.
        clip_gradient: clip the cotangents of the logits at this norm, `clipless.nn.ClipGradient`.
    """

    input_shape: tuple[int, ...]
    classes: int
    input_norm: float | None = None
    input_mode: Literal["clip", "sphere"] = "clip"
    constraint: Literal["orthogonal", "ball"] = "orthogonal"
    output_bias: float | None = None
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        """Check every field against its type, and bring lists and integers to their final form."""
        kinds = get_type_hints(type(self))
        for field in fields(self):
            if field.init:
                value = _checked(field.name, getattr(self, field.name), kinds[field.name])
                object.__setattr__(self, field.name, value)

    @property
    def guard_norm(self) -> float:
        """The norm that the input guard enforces: `input_norm`, or what stands for it."""
        if self.input_norm is not None:
            return self.input_norm
        return 1.0 if self.input_mode == "sphere" else math.sqrt(math.prod(self.input_shape)) / 4


def _checked(name: str, value: Any, kind: Any) -> Any:
    """Return `value` as the annotated type, or refuse it."""
    if get_origin(kind) in (Union, UnionType):  # an optional value
        if value is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(map(repr, get_args(kind)))
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        return value
    if get_origin(kind) is tuple:
        values = value if isinstance(value, list | tuple) else (value,)
        return tuple(_count(f"every number in {name}", each) for each in values)
    if kind is int:
        return _count(name, value)
    if kind is float:
        return require_positive(name, value)
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value
