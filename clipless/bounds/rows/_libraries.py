"""Shortcuts of other libraries that look at a whole batch: off while a model is private."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.Lock()
_MODULES = ("transformers.masking_utils", "transformers.modeling_utils")
_users = 0
_replaced: list[tuple[Any, Any]] = []


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Let Hugging Face models use the masks that they are given.

    They leave a mask out if no example of the batch needs it (`if mask.all():`), so that one
    example decides how others are computed; not, however, while they are traced, which is what they
    are told here. A shortcut that this does not reach is refused by the trace, as for any model.
    """
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            for name in _MODULES:
                module = sys.modules.get(name)
                known = getattr(module, "is_tracing", None)
                if known is not None:
                    _replaced.append((module, known))
                    module.is_tracing = _always  # type: ignore[union-attr]
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                while _replaced:
                    module, known = _replaced.pop()
                    module.is_tracing = known


def _always(*arguments: Any, **named: Any) -> bool:
    return True
