"""Work on the CPU, cut into parts that fit into a cache, so that no operator waits for memory.

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


def in_parts(work: Callable[[slice], None], count: int, *, entries: int) -> None:
    """Call `work` with slices that together cover `range(count)`, on torch's number of threads.

    Args:
        work: writes its part of the results; parts may run at the same time.
        count: number of items.
        entries: how many entries of an item the largest single operator works on.
    """
    size = max(1, GRAIN // entries)
    starts = range(0, count, size)

    def run(first: int, step: int) -> None:
        for start in starts[first::step]:
            work(slice(start, start + size))

    threads = torch.get_num_threads() if entries <= GRAIN else 1
    if threads == 1 or count * entries < _WORTH_THREADS:
        run(0, 1)
        return
    helpers = [_Helper(run, first, threads) for first in range(1, threads)]
    for helper in helpers:
        helper.start()
    try:
        run(0, threads)
    finally:
        for helper in helpers:
            helper.join()
    for helper in helpers:
        if helper.error is not None:
            raise helper.error


class _Helper(threading.Thread):
    """One more thread, in the caller's mode and without a graph."""

    def __init__(self, run: Callable[[int, int], None], first: int, step: int) -> None:
        super().__init__(daemon=True)
        self._work = (run, first, step)
        self._inference = torch.is_inference_mode_enabled()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and keep its error for the caller."""
        run, first, step = self._work
        try:
            with torch.inference_mode(self._inference), torch.no_grad():
                run(first, step)
        except BaseException as error:
            self.error = error
