"""Exit codes that scripts can use, and which error leads to which."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    CHECK_FAILED = 1
    """A certificate broke, an audit exposed a claim, gradients exceeded their bounds."""
    USAGE = 2
    """Bad arguments or a bad configuration."""
    DATA = 3
    """Data are missing or corrupt."""
    BUDGET = 4
    """The privacy budget does not allow it, or ran out before the planned steps were taken."""
    RUN_FOLDER = 5
    """A run folder is incomplete, damaged, or belongs to something else."""
    REFUSED = 6
    """No guarantee could be given: an operation without a rule, an unbounded sensitivity."""
    MISSING_PACKAGE = 7
    """An optional package is not installed."""
    UNEXPECTED = 70
    """An error that nobody foresaw."""
    INTERRUPTED = 130
    """Ctrl-C."""


class CheckFailedError(Exception):
    """A check that a command was asked to make has failed; its output is complete."""


_CODES = {
    "KeyboardInterrupt": ExitCode.INTERRUPTED,
    "Abort": ExitCode.INTERRUPTED,  # what typer makes of it
    "ConfigError": ExitCode.USAGE,
    "DataFileError": ExitCode.DATA,
    "DataNotFoundError": ExitCode.DATA,
    "BudgetExhaustedError": ExitCode.BUDGET,
    "RunFolderError": ExitCode.RUN_FOLDER,
    "LedgerError": ExitCode.RUN_FOLDER,
    "CliplessError": ExitCode.REFUSED,
    "ImportError": ExitCode.MISSING_PACKAGE,
    "PermissionError": ExitCode.USAGE,  # a file or folder that was named cannot be used
    "NotADirectoryError": ExitCode.USAGE,
    "IsADirectoryError": ExitCode.USAGE,
}


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error: that of the first class it derives from which has one.

    Classes are known by name, so that torch is not loaded only to say what was wrong.

    Example:
        >>> from clipless.runs import ConfigError
        >>> exit_code_of(ConfigError("epsilon must be above 0"))
        <ExitCode.USAGE: 2>
    """
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_CODES[name] for name in names if name in _CODES), ExitCode.UNEXPECTED)
