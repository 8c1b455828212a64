"""Checks of arguments that several rooms share."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def not_set_error(what: str) -> RuntimeError:
    """Return the error for a value that an earlier stage should have set."""
    return RuntimeError(f"{what} is not set, which an earlier stage should have done.")


def require_positive(name: str, value: float) -> float:
    """Return `value` as a float, or refuse what is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and greater than 0, got {value!r:.40}.")
    return float(value)


def names_moved_arguments(**places: type) -> Callable[[_Callable], _Callable]:
    """Return a decorator for functions whose former arguments have moved into option objects.

    `places` has, for an argument that takes an object of options, the class of that object. A
    keyword that the function does not take is looked up in their constructors, and the
    `TypeError` says what to write. A class is decorated by its constructor.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Colours:
        ...     ink: str = "black"
        >>> @names_moved_arguments(colours=Colours)
        ... def draw(*, colours=Colours()):
        ...     return colours.ink
        >>> draw(ink="red")
        Traceback (most recent call last):
        TypeError: draw() takes ink as colours=Colours(ink=...)
    """

    def decorate(target: _Callable) -> _Callable:
        if isinstance(target, type):
            constructor: Any = target.__init__  # type: ignore[misc]
            target.__init__ = _checked(constructor, target.__name__, places)  # type: ignore[misc]
            return target
        return _checked(target, target.__name__, places)

    return decorate


def _checked(function: Any, name: str, places: dict[str, type]) -> Any:
    own = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        for keyword in keywords.keys() - own.keys():
            written = _written(keyword, places)
            if written is not None:
                raise TypeError(f"{name}() takes {keyword} as {written}")
        return function(*arguments, **keywords)

    return checked


def _written(keyword: str, places: dict[str, type]) -> str | None:
    """Return how the keyword is written inside the objects at `places`, or None."""
    for argument, kind in places.items():
        parameters = inspect.signature(kind).parameters
        inner = {name: type(p.default) for name, p in parameters.items()
                 if hasattr(p.default, "__dataclass_fields__")}  # fmt: skip
        found = f"{keyword}=..." if keyword in parameters else _written(keyword, inner)
        if found is not None:
            return f"{argument}={kind.__name__}({found})"
    return None
