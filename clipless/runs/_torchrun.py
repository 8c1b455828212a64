"""Rank and restarts of `torchrun` processes, from the environment, without torch."""

from __future__ import annotations

import os


def torchrun_rank() -> int | None:
    """Return which of several processes of `torchrun` this is, or None if there are not several.

    Example:
        >>> torchrun_rank() is None
        True
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "LOCAL_RANK" not in os.environ:
        return None
    return int(os.environ["RANK"])


def is_first_process() -> bool:
    """Return whether this is process 0, or the only one."""
    return not torchrun_rank()


def was_restarted() -> bool:
    """Return whether `torchrun` has started its processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
