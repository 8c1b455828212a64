"""The report of a run: one page for people, the same as JSON for machines."""

from clipless.report._bounds import BoundsCallback
from clipless.report._build import build, write_report
from clipless.report._errors import ReportError
from clipless.report._report import RunReport
from clipless.report._signal import SignalCallback

__all__ = [
    "build",
    "write_report",
    "RunReport",
    "ReportError",
    "SignalCallback",
    "BoundsCallback",
]
