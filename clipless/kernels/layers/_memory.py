"""Work on the CPU in blocks that fit into a cache.

A chain of operators on large tensors writes every intermediate result to memory and reads it back.
Cut into small parts it does not; but torch would start and stop all its threads for every one of
many small operators. So parts are small enough for torch to run them where they are called, and
the threads are started here, once for the whole chain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

# Operators on no more entries than this are run by torch in the calling thread.
GRAIN = 1 << 15
# Starting threads takes about as long as work on this many entries.
_WORTH_THREADS = 1 << 19


def run_in_blocks(work: Callable[[slice], None], count: int, *, entries: int) -> None:
    """Call `work` with slices that together cover `range(count)`, on torch's number of threads.

    Args:
        work: writes its part of the results; parts may run at the same time.
        count: number of items.
        entries: how many entries of an item the largest single operator works on.
    """
    size = max(1, GRAIN // entries)
    starts, taking = iter(range(0, count, size)), threading.Lock()

    def run() -> None:
        # Whoever is free takes the next part: cores are rarely equally fast, or equally busy.
        while True:
            with taking:
                start = next(starts, None)
            if start is None:
                return
            work(slice(start, start + size))

    threads = torch.get_num_threads() if entries <= GRAIN else 1
    if threads == 1 or count * entries < _WORTH_THREADS:
        run()
        return
    helpers = [_Helper(run) for _ in range(1, threads)]
    for helper in helpers:
        helper.start()
    try:
        run()
    finally:
        for helper in helpers:
            helper.join()
    for helper in helpers:
        if helper.error is not None:
            raise helper.error


class _Helper(threading.Thread):
    """One more thread, in the caller's mode and without a graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._inference = torch.is_inference_mode_enabled()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and keep its error for the caller."""
        try:
            with torch.inference_mode(self._inference), torch.no_grad():
                self._work()
        except BaseException as error:
            self.error = error
