"""The error of configurations."""

from clipless.errors import CliplessError


class ConfigError(CliplessError, ValueError):
    """A configuration that means nothing, or asks for something that does not exist."""
