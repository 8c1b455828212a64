"""The exceptions that readers of malformed files raise, and their text."""

from __future__ import annotations

MALFORMED_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,  # a whole number of hundreds of digits
    RecursionError,  # JSON nested thousands of times
)


def error_text(error: BaseException) -> str:
    """Return the text of an exception; a bare key, of a KeyError, is said to be missing.

    Example:
        >>> error_text(KeyError("delta"))
        "it lacks 'delta'"
    """
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__
