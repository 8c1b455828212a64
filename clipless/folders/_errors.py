"""The error of run folders."""

from clipless.errors import CliplessError


class RunFolderError(CliplessError, RuntimeError):
    """A run folder that is incomplete, was damaged, or belongs to something else."""
