"""The error of configurations."""

from clipless.errors import CliplessError


class ConfigError(CliplessError, ValueError):
    """An invalid configuration, or one that names something unknown."""
