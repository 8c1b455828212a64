"""The command line: `clipless`. One command a file; what they do is in the other packages."""

from clipless.cli._main import main

__all__ = ["main"]
