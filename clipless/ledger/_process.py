"""Open ledgers of this process: closed when it ends, released in forked children."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

from clipless.errors import LedgerError


class OpenLedger(Protocol):
    """The interface of ledgers that are still open when a process ends or forks."""

    def close(self) -> None: ...

    def let_go_in_child(self) -> None: ...


_open: weakref.WeakSet[OpenLedger] = weakref.WeakSet()


def opened(ledger: OpenLedger) -> None:
    """Remember to close this ledger when the program ends."""
    _open.add(ledger)


def closed(ledger: OpenLedger) -> None:
    """Forget a ledger that is closed."""
    _open.discard(ledger)


def _close_all() -> None:
    for ledger in list(_open):
        with contextlib.suppress(LedgerError):
            ledger.close()


def _let_go_in_child() -> None:
    for ledger in list(_open):
        ledger.let_go_in_child()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
