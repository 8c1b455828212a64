"""What goes wrong with configurations and run folders."""

from clipless.errors import CliplessError


class ConfigError(CliplessError, ValueError):
    """A configuration that means nothing, or asks for something that does not exist."""


class RunFolderError(CliplessError, RuntimeError):
    """A run folder that is incomplete, was damaged, or belongs to something else."""
