"""Hooks on an eager model, its criterion and its optimizer, which call the stages of a step.

They are inert on copies of their owner, and no obstacle to copying or saving it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipless.bounds import TRIAL_RUN
from clipless.nn import ConstrainedModule
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._output_guard import call_of, main_output, plain_reduction, watch_output

if TYPE_CHECKING:
    from clipless.privacy.step._session import TrainingSession


class EagerHooks:
    """The hooks of a session: each calls a stage of its step, or refuses once it is over."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._handles: list[tuple[object, Any]] = []

    @property
    def owners(self) -> set[int]:
        """The identities of the objects that hooks are on."""
        return {id(owner) for owner, _ in self._handles}

    def put_on(self) -> None:
        """Put hooks on model, layers, criterion and optimizer."""
        session = self._session
        model, criterion, optimizer = session.model, session.criterion, session.optimizer
        hook = self._hook(model, self._before_forward, self._refuse_forward)
        first = session.group.hooks_first
        handle = model.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
        self._keep(model, handle)
        hook = self._hook(model, self._after_forward)
        handle = model.register_forward_hook(hook, always_call=True, with_kwargs=True)
        self._keep(model, handle)
        for module in model.modules():
            if module is not model and isinstance(module, ConstrainedModule):
                hook = self._hook(module, self._inner_call, self._refuse_forward, inside=True)
                self._keep(module, module.register_forward_pre_hook(hook))
        hook = self._hook(criterion, self._before_criterion, self._refuse_criterion)
        self._keep(criterion, criterion.register_forward_pre_hook(hook))
        hook = self._hook(criterion, self._after_criterion, self._after_criterion)
        self._keep(criterion, criterion.register_forward_hook(hook))
        hook = self._hook(optimizer, self._before_optimizer, self._refuse_optimizer)
        self._keep(optimizer, optimizer.register_step_pre_hook(hook))
        hook = self._hook(optimizer, self._after_optimizer)
        self._keep(optimizer, optimizer.register_step_post_hook(hook))
        hook = self._hook(optimizer, session.group.before_state_dict)
        self._keep(optimizer, optimizer.register_state_dict_pre_hook(hook))

    def take_off(self, owners: set[int]) -> None:
        """Remove the hooks from objects with these identities."""
        kept = []
        for owner, handle in self._handles:
            if id(owner) in owners:
                handle.remove()
            else:
                kept.append((owner, handle))
        self._handles = kept

    def _keep(self, owner: object, handle: Any) -> None:
        self._handles.append((owner, handle))

    def _hook(
        self, owner: object, action: Any, when_over: Any = None, *, inside: bool = False
    ) -> SessionHook:
        """Return a hook that does one thing while the session trains, and another afterwards."""
        session = self._session

        def act(*arguments: Any) -> Any:
            chosen = action if session.over is None else when_over
            return None if chosen is None else chosen(*arguments)

        return SessionHook(owner, act, inside=inside)

    # --- the stages ------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, inputs: Any, named: Any) -> None:
        self._session.before_forward(inputs, named=named)

    def _after_forward(self, model: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        return self._session.after_forward((*inputs, *named.values()), output)

    def _inner_call(self, module: nn.Module, inputs: Any) -> None:
        session = self._session
        if torch.compiler.is_compiling() or session.inside_forward:
            return
        if session.model.training and torch.is_grad_enabled():
            raise refusals.layer_called_alone(module)

    def _before_criterion(self, criterion: Any, arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return (main_output(arguments[0]), *arguments[1:]) if arguments else None
        if arguments:
            arguments = (main_output(arguments[0]), *arguments[1:])
        session, call = self._session, call_of(arguments[0]) if arguments else None
        if call is not None and call.session is not session and call.session.criterion is criterion:
            return arguments  # the output of another private model, with a session of its own
        if call is None and not session.model.training:
            return arguments
        return (watch_output(session.before_criterion(arguments)), *arguments[1:])

    def _after_criterion(self, criterion: Any, arguments: Any, losses: Tensor) -> Tensor:
        session = self._session
        call = call_of(arguments[0]) if torch.is_grad_enabled() else None
        if call is None and losses.ndim:
            return plain_reduction(losses, session.original_reduction)
        if call is None or call.session is not session:
            return losses
        return session.after_criterion(call, losses)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return self._session.before_optimizer(args, kwargs)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._session.after_optimizer()

    # --- when the session is over ----------------------------------------------------------------

    def _refuse_forward(self, module: nn.Module, inputs: Any, named: Any = None) -> None:
        if module.training and torch.is_grad_enabled():
            raise refusals.session_over("the model", self._session.over)

    def _refuse_criterion(self, criterion: Any, arguments: Any) -> None:
        call = call_of(arguments[0]) if arguments else None
        own = call is None or call.session is self._session  # it may serve several sessions
        if own and self._session.model.training and torch.is_grad_enabled():
            raise refusals.session_over("the criterion", self._session.over)

    def _refuse_optimizer(self, *arguments: Any) -> None:
        raise refusals.session_over("the optimizer", self._session.over)


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
        if self._owner() is not owner or TRIAL_RUN.here:
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
