"""The report of a run: a page to publish and a private one, the same as JSON for machines."""

from clipless.report._build import build, write_report
from clipless.report._deployment import deployment_record
from clipless.report._distributed_signal import DistributedSignalCallback
from clipless.report._errors import ReportError
from clipless.report._report import RunReport
from clipless.report._signal import SignalCallback
from clipless.report.sections._bounds import BoundsCallback

__all__ = [
    "build",
    "write_report",
    "deployment_record",
    "RunReport",
    "ReportError",
    "SignalCallback",
    "BoundsCallback",
    "DistributedSignalCallback",
]
