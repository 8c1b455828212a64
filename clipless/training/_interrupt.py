"""Deferred interrupts: Ctrl-C takes effect between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Whether an interrupt was requested."""

    requested = False


@contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Keep the first Ctrl-C until it is asked for; a second one works at once.

    Signals reach the main thread only. In other threads, and where somebody has installed a
    handler of their own, nothing is changed.
    """
    interrupt = Interrupt()
    usual = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not usual
    ):
        yield interrupt
        return

    def keep(number: int, frame: Any) -> None:
        if interrupt.requested:
            usual(number, frame)
        interrupt.requested = True

    signal.signal(signal.SIGINT, keep)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, usual)
