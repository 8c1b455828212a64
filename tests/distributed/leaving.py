"""`python -m tests.distributed.leaving ...` is `clipless ...`, and says what is left at its end.

Threads that still hold a message when Python ends take the process down with them (SIGABRT).
"""

import atexit
import os
import sys
from pathlib import Path


def _say():
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    left = sorted(name for name in names if "gloo" in name)
    sys.stderr.write(f"process {os.environ['RANK']} leaves {left or 'nothing'} behind\n")


if __name__ == "__main__":
    atexit.register(_say)  # so early that it is the last to be called

    from clipless.cli import main

    main()
