"""The one place where noise is added to what was computed from data.

Gradients, counts and private statistics all leave through `release_`, each with the distance that
one record can move it by. Randomness that is not noise on data, such as the key that samples are
drawn with, comes from `fresh_bits`. An audit watches both, here and nowhere else: it records what
one run releases and hands the same results out to another (see `clipless.audit.replay`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # the ledger, which needs no torch, publishes its lines here
    from torch import Tensor


class Query(NamedTuple):
    """What is said of a released tensor: how far one record moves it, and the noise it gets."""

    name: str
    sensitivity: float
    """The largest Euclidean norm of what one record contributes, rounding included."""
    deviation: float
    """The standard deviation of the noise on every entry."""


class Watcher(Protocol):
    """An audit that takes part in all releases of the thread that it watches."""

    def release(
        self, values: Sequence[Tensor], queries: Sequence[Query], add_noise: Callable[[], None]
    ) -> None:
        """See values without noise; let noise be added to them, or put other results in place."""

    def bits(self, count: int) -> int:
        """Return the randomness for something that is no noise."""

    def public(self, kind: str, value: Any) -> None:
        """Take note of something that the library calls public."""

    def empty_row(self, size: int) -> int | None:
        """Return which of `size` records is empty, if one is: it contributes nothing."""


class Noise(Protocol):
    """What adds noise, in place."""

    def add_(self, values: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Add the noise of one release."""


_watcher: ContextVar[Watcher | None] = ContextVar("clipless_watcher", default=None)


def release_(values: Sequence[Tensor], queries: Sequence[Query], noise: Noise) -> None:
    """Add noise in place to what one mechanism releases; the ledger must have counted it."""
    watcher = _watcher.get()

    def add_noise() -> None:
        noise.add_(values, queries)

    if watcher is None:
        add_noise()
    else:
        watcher.release(values, queries, add_noise)


def fresh_bits(count: int) -> int:
    """Return random bits from the operating system, for what is random and not noise on data."""
    watcher = _watcher.get()
    return secrets.randbits(count) if watcher is None else watcher.bits(count)


def publish(kind: str, value: Any) -> None:
    """Tell an audit, if one watches, of something that is public: it may not depend on records."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.public(kind, value)


def empty_row(size: int) -> int | None:
    """Return which of `size` records counts as empty: outside of an audit, none does."""
    watcher = _watcher.get()
    return None if watcher is None else watcher.empty_row(size)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let an audit watch what this thread releases."""
    if _watcher.get() is not None:
        raise RuntimeError("an audit is watching already: audits do not nest")
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
