"""The life of a private training run: it is attached, ends, is replaced, or is detached."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from clipless.accounting import History
from clipless.bounds import ModelSnapshot
from clipless.distributed import without_sharding
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.nn import set_loss_scale
from clipless.privacy.compiled._calls import CompiledCalls
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._hooks import EagerHooks
from clipless.privacy.step._step import PrivateStep

_LISTING = threading.Lock()
_CHANGING = threading.RLock()
"""Held by who puts hooks on or off: of two that want one model, the second takes over."""
_ATTACHED: weakref.WeakSet[TrainingSession] = weakref.WeakSet()
"""All sessions whose hooks are on some object."""


class TrainingSession(PrivateStep):
    """Private steps of one model, from the moment its hooks are on until they are taken off."""

    over: str | None = None
    """Why nothing can be trained any more, if so."""
    _compiled: CompiledCalls | None = None

    @cached_property
    def _hooks(self) -> EagerHooks:
        return EagerHooks(self)

    @cached_property
    def original_reduction(self) -> str:
        """How the criterion reduces losses outside of private training."""
        # Kept on the criterion, since another session may have changed it already.
        return vars(self.criterion).get("_clipless_reduction", self.criterion.reduction)

    def attach(self, **sampling: Any) -> None:
        """Take over loader, model, optimizer and criterion. Until here nothing was changed.

        `sampling` says how the loader begins: see `PrivateLoader.begin`.
        """
        self.loader.begin(self, **sampling)
        self._book.last_step = self.loader.next_step - 1
        with _CHANGING:
            take_over(self)
            self._gradients.drop()  # of whatever came before
            self._set_loss_scale(1 / self.plan.loss_divisor)
            vars(self.criterion)["_clipless_reduction"] = self.original_reduction
            self.criterion.reduction = "none"
            self._hooks.put_on()
            self._criterion_as_checked = ModelSnapshot(self.criterion)
            with _LISTING:
                _ATTACHED.add(self)
        self._guard.begin()

    def require_live(self) -> None:
        """Refuse to change a session that is over."""
        if self.over is not None:
            raise refusals.session_over("the session", self.over)

    def allows_step(self) -> bool:
        """Whether the budget has room for one more step."""
        try:
            self._book.require_budget(self.plan, self._book.last_step + 1)
        except BudgetExhaustedError:
            return self.outcomes.left > 0  # steps that are repeated are paid for
        return True

    def cost_of_further(self, steps: int) -> History:
        """Return what so many more steps will cost; those that are repeated are paid for."""
        begin = self._book.last_step + 1
        paid = begin + self.outcomes.left
        return self.plan.schedule.cost(paid, begin + steps, first=self._book.first)

    def end(self, reason: str) -> None:
        """Train no more. The hooks stay where they are, and refuse."""
        if self.over is None:
            self.over = reason
            self._book.progress = None
            self._gradients.give_up()
            self._pass.close()  # a pass that was interrupted
            self._remove_compiled()
            self.loader.end(reason)

    def replace_by(self, session: TrainingSession) -> None:
        """End, and give what both sessions hold to the other one."""
        self.end("another make_private has taken over its model, its parameters or its optimizer")
        self._hooks.take_off(_owned_by(session))
        if not self._hooks.owners:
            self._forget()

    def _forget(self) -> None:
        """No longer be listed: no hook is on any object."""
        with _LISTING:
            _ATTACHED.discard(self)

    def detach(self) -> None:
        """Take all hooks off: model, criterion, optimizer and loader are ordinary again."""
        with _CHANGING:
            self._make_ordinary()

    def _make_ordinary(self) -> None:
        self.end("it was detached")
        held = self._hooks.owners
        self._hooks.take_off(held)
        self._forget()
        self.loader.let_go(self)
        self.group.leave()
        shared = any(other.criterion is self.criterion for other in attached_sessions())
        if id(self.criterion) in held and not shared:
            self.criterion.reduction = self.original_reduction  # type: ignore[assignment]
            vars(self.criterion).pop("_clipless_reduction", None)
        if id(self.model) in held:
            self._set_loss_scale(1.0)
            for other in attached_sessions():  # which may train a part of this model
                if other.over is None:
                    other._set_loss_scale(1 / other.plan.loss_divisor)

    def _set_loss_scale(self, scale: float) -> None:
        with without_sharding(self.model):
            set_loss_scale(self.model, scale)

    def _remove_compiled(self) -> None:
        if self._compiled is not None:
            self._compiled.remove()
            self._compiled = None

    def compile(self, *, backend: str, mode: str | None) -> None:
        """Compile forward and backward pass, and on a GPU the criterion and the projection."""
        self.require_live()
        self.group.refuse_compiled()
        if self.plan.user_records is not None:
            raise refusals.users_run_eagerly()
        if self._book.progress is not None:
            raise PrivacyError("a step is under way: compile between steps")
        if self._guard.changed():
            self._renew_bounds()
        self._remove_compiled()
        self._compiled = CompiledCalls(self, backend=backend, mode=mode)
        self._guard.compile(backend=backend)
        self._guard.accept()

    @property
    def compiled(self) -> bool:
        """Whether the model runs compiled."""
        return self._compiled is not None and self._compiled.works

    @property
    def uses_graphs(self) -> bool:
        """Whether the model's passes are launched as CUDA graphs."""
        return self._compiled is not None and self._compiled.uses_graphs

    @property
    def on_cuda(self) -> bool:
        """Whether the whole model is on a CUDA device."""
        return all(parameter.is_cuda for parameter in self._trainable)

    @property
    def on_accelerator(self) -> bool:
        """Whether the model is on a device that should not be waited for."""
        return any(parameter.device.type != "cpu" for parameter in self._trainable)

    def set_noise_multiplier(self, noise_multiplier: float) -> None:
        """Use another amount of noise from the next step on."""
        self.require_live()
        if self._book.progress is not None:
            raise PrivacyError("a step is under way: change the noise between steps")
        if not self._projection and noise_multiplier != 0:
            raise PrivacyError("without projection there are no bounds to scale noise by")
        changed = noise_multiplier != self.plan.noise_multiplier
        if changed and self.plan.each_step is None and self.ledger.releases:
            raise refusals.noise_of_a_pass()
        if changed and self.ledger.filter is None and self.ledger.releases:
            raise refusals.noise_chosen_after_looking()
        self.plan = replace(self.plan, noise_multiplier=float(noise_multiplier))


def attached_sessions() -> list[TrainingSession]:
    """Return the sessions whose hooks are on, those that are over included."""
    with _LISTING:
        return list(_ATTACHED)


def take_over(session: TrainingSession) -> None:
    """End the sessions that train what `session` is about to train, of whatever engine.

    A criterion alone may serve several sessions: each reduces the losses of its own model.
    """
    model, trainable = session.model, set(map(id, session._trainable))
    modules = set(map(id, model.modules()))
    for other in attached_sessions():
        if other is session:
            continue
        shared = trainable & set(map(id, other._trainable))
        nested = id(other.model) in modules or any(m is model for m in other.model.modules())
        if shared or nested or other.optimizer is session.optimizer:
            other.replace_by(session)


def _owned_by(session: TrainingSession) -> set[int]:
    """The identities of everything that a session puts hooks on."""
    owners: list[nn.Module | object] = [*session.model.modules(), session.optimizer]
    return set(map(id, [*owners, session.criterion]))
