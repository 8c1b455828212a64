"""Every error that clipless raises on purpose.

All of them derive from `CliplessError`; each also derives from the built-in error a
Python programmer would expect. The message says what was wrong, where, and what to do.
"""


class CliplessError(Exception):
    """Base of all errors raised on purpose by this library."""


class UnsupportedOperationError(CliplessError, TypeError):
    """The model contains an operation for which no sensitivity can be proved."""


class UnboundedSensitivityError(CliplessError, ValueError):
    """A parameter's gradient has no finite bound, usually for want of an input guard."""


class ConstraintError(CliplessError, ValueError):
    """A weight lies outside the constraint set that its layer's bound was proved for."""


class LabelError(CliplessError, ValueError):
    """Targets of a kind, shape or range the loss's Lipschitz constant was not derived for."""


class PrivacyError(CliplessError, RuntimeError):
    """The requested action would void, or cannot be covered by, the privacy guarantee."""


class DamagedFileError(CliplessError, ValueError):
    """A saved file is damaged, or not what its name says. The message names it."""


class BudgetExhaustedError(PrivacyError):
    """The next step would spend more than the agreed privacy budget."""


class LedgerError(PrivacyError):
    """The ledger on disk cannot be written, is held by another process, or is damaged."""
