"""The error of reports."""

from clipless.errors import CliplessError


class ReportError(CliplessError, ValueError):
    """The folder is not that of a run, or what a report cannot do without is damaged."""
