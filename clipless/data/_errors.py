"""Errors of data files."""

from clipless.errors import CliplessError


class DataFileError(CliplessError, ValueError):
    """A file is corrupt, truncated, or not what its name says. It is named."""


class DataNotFoundError(CliplessError, FileNotFoundError):
    """Files are not where they were looked for, and could not be downloaded."""
