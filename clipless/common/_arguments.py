"""Checks of arguments that several rooms share."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


_ELSEWHERE = {
    "max_grad_norm": "gradients are not clipped: their bounds follow from the architecture. Leave "
    "it out; clipless.nn.ClipGradient(norm) at the output, or "
    "bounds=ProvedBounds(product_clip=0.3), lowers the noise",
    "poisson_sampling": "write sampling='poisson', which is the default",
    "clipping": "gradients are not clipped. Leave it out",
    "grad_sample_mode": "there are no per-example gradients. Leave it out",
    "loss_reduction": "the criterion sums over examples and divides by the expected batch size. "
    "Leave it out",
    "product_clip": "write bounds=ProvedBounds(product_clip=...), with the ProvedBounds of "
    "clipless.privacy",
    "batch_first": "the batch is the first axis. Leave it out",
    "secure_mode": "noise comes from the operating system's randomness already. Leave it out",
}
"""Arguments of Opacus and of earlier versions that are written in another way, or have no use."""


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


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest known name, with a space before it, or nothing.

    Example:
        >>> "there is no model 'lent'." + did_you_mean("lent", ["lenet", "vgg"])
        "there is no model 'lent'. Did you mean 'lenet'?"
        >>> did_you_mean("transformer", ["lenet", "vgg"])
        ''
    """
    folded = {each.lower().replace("_", "-"): each for each in known}
    near = difflib.get_close_matches(str(name).lower().replace("_", "-"), folded, n=1)
    return f" Did you mean {folded[near[0]]!r}?" if near else ""


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
    signature = inspect.signature(function)
    own = signature.parameters

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        for keyword in keywords.keys() - own.keys():
            written = _written(keyword, places)
            if written is not None:
                raise TypeError(f"{name}() takes {keyword} as {written}")
            if keyword in _ELSEWHERE:
                raise TypeError(f"{name}() takes no {keyword}: {_ELSEWHERE[keyword]}")
        if own.keys() >= {"criterion"} and "criterion" not in keywords:
            try:
                signature.bind(*arguments, **keywords)
            except TypeError as error:
                if "'criterion'" in str(error):
                    raise TypeError(
                        f"{name}() needs criterion: a loss of clipless.losses, such as "
                        "CrossEntropy(), whose Lipschitz constant is part of every bound"
                    ) from None
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
