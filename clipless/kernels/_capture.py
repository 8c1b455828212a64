"""The lock of those who capture models.

Symbolic tracing patches torch's modules for the whole process, and compiled functions refuse to run
meanwhile. So one thread at a time traces a model, or enters compiled code.
"""

from __future__ import annotations

import threading

TRACING_LOCK = threading.RLock()
