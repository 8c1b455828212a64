"""All sessions whose hooks are on some object: who holds a model, an optimizer, a criterion."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from clipless.privacy.step._session import TrainingSession

_lock = threading.Lock()
CHANGING = threading.RLock()
"""Held by who puts hooks on or off: of two that want one model, the second takes over."""
_attached: weakref.WeakSet[TrainingSession] = weakref.WeakSet()


def attached(session: TrainingSession) -> None:
    """Remember a session that has put its hooks on."""
    with _lock:
        _attached.add(session)


def detached(session: TrainingSession) -> None:
    """Forget a session that has taken its hooks off."""
    with _lock:
        _attached.discard(session)


def all_attached() -> list[TrainingSession]:
    """Return the sessions whose hooks are on, those that are over included."""
    with _lock:
        return list(_attached)


def take_over(session: TrainingSession) -> None:
    """End the sessions that train what `session` is about to train, of whatever engine.

    A criterion alone may serve several sessions: each reduces the losses of its own model.
    """
    model, trainable = session.model, set(map(id, session._trainable))
    modules = set(map(id, model.modules()))
    for other in all_attached():
        if other is session:
            continue
        shared = trainable & set(map(id, other._trainable))
        nested = id(other.model) in modules or any(m is model for m in other.model.modules())
        if shared or nested or other.optimizer is session.optimizer:
            other.replace_by(session)


def owned_by(session: TrainingSession) -> set[int]:
    """The identities of everything that a session puts hooks on."""
    owners: list[nn.Module | object] = [*session.model.modules(), session.optimizer]
    return set(map(id, [*owners, session.criterion]))
