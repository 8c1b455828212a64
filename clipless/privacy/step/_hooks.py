"""Hooks that belong to one session: inert on copies, and never an obstacle to copying or saving."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from clipless.bounds import is_trial_run


class SessionHook:
    """Calls a method of a session for one owner (a module or an optimizer).

    Copies of the owner keep the hook but are not the owner, so it does nothing there; a model can
    be deep-copied or pickled while it is in training. The session lives as long as its hooks.
    """

    def __init__(self, owner: object, action: Callable[..., Any], *, inside: bool = False) -> None:
        self._owner = weakref.ref(owner)
        self._action = action
        self._inside = inside
        """Whether compiled code may do without the hook, instead of stopping for it."""
        # Compiled code stops here and calls the hook. Wrapped now and not by a decorator, which
        # would load the compiler as soon as this library is imported.
        self._run = torch.compiler.disable(self._pass_on)

    def __call__(self, owner: object, *arguments: Any) -> Any:
        """Pass the call on if it comes from the owner itself."""
        if not torch.compiler.is_compiling():
            return self._pass_on(owner, *arguments)
        return None if self._inside else self._run(owner, *arguments)

    def _pass_on(self, owner: object, *arguments: Any) -> Any:
        if self._owner() is not owner or is_trial_run():
            return None
        return self._action(owner, *arguments)

    def __deepcopy__(self, memo: Any) -> SessionHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inert, ())


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    return None
