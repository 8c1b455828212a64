"""The layout of a run folder: the name of every file, and which of them are private.

No other module of the package writes these names down.
"""

from __future__ import annotations

from enum import StrEnum

FORMAT, VERSION = "clipless-run-folder", 2
"""Version 1 has no `format.json`; its other files are those of version 2."""


class RunFile(StrEnum):
    """A file, or a folder of files, in a run folder; the value is its name."""

    FORMAT = "format.json"
    """The version of the layout."""
    CONFIG = "config.json"
    """The exact configuration, everything filled in."""
    ENVIRONMENT = "environment.json"
    """Versions and device."""
    PLAN = "plan.json"
    """The plan, and the model, data and training that it was made for."""
    LEDGER = "ledger.jsonl"
    """What has been spent. Where files contradict each other, the ledger counts."""
    STATISTICS = "statistics.jsonl"
    """For tables, the noisy answers that were released before training."""
    WEIGHTS = "model.safetensors"
    """The final weights; for tables, the fitted estimator."""
    COLUMNS = "columns.json"
    """For tables, what the model makes of each column, from released numbers."""
    BOUNDS = "bounds.json"
    """Every bound, and the certificates of the weights."""
    SIGNAL = "signal.jsonl"
    """Signal and noise, from released gradients."""
    REPORT_HTML = "report.html"
    """The page that may be published."""
    REPORT_JSON = "report.json"
    """The same as data."""
    DEPLOYMENT = "deployment.json"
    """What somebody who publishes the model has to declare."""
    RESULT = "result.json"
    """How training ended, at what price, with metrics on test data. Private."""
    DATA = "data.json"
    """Keyed digests of the data, by which they are recognised. Private."""
    SECRETS = "private"
    """The folder of the key of these digests. Private."""
    DATA_KEY = "private/data.key"
    """The key of these digests. Private."""
    METRICS = "metrics.jsonl"
    """Loss and accuracy on the private data. Private."""
    TIGHTNESS = "tightness.jsonl"
    """Norms of the gradients of training examples. Private."""
    ROBUSTNESS = "robustness.json"
    """Certified accuracy on test data. Private."""
    AUDIT = "audit.json"
    """Attacks on the trained model. Private."""
    PRIVATE_REPORT_HTML = "report-private.html"
    """The page of what was computed from data without noise. Private."""
    PRIVATE_REPORT_JSON = "report-private.json"
    """The same as data. Private."""
    CHECKPOINTS = "checkpoints"
    """The folder of the last states to go on from. Secret: they determine samples and noise."""
    TENSORBOARD = "tensorboard"
    """The folder of TensorBoard's own files. Private."""


class CheckpointFile(StrEnum):
    """A file of one checkpoint; `optimizer` and `state` are trees of data, in two files each."""

    MANIFEST = "manifest.json"
    WEIGHTS = "weights.safetensors"
    AVERAGE = "average.safetensors"
    LEDGER = "ledger.jsonl"
    STATE = "state.json"
    STATE_TENSORS = "state.safetensors"
    OPTIMIZER = "optimizer.json"
    OPTIMIZER_TENSORS = "optimizer.safetensors"


PRIVATE_NAMES = frozenset(
    name.value
    for name in (
        RunFile.RESULT, RunFile.DATA, RunFile.SECRETS, RunFile.METRICS, RunFile.TIGHTNESS,
        RunFile.ROBUSTNESS, RunFile.AUDIT, RunFile.PRIVATE_REPORT_HTML,
        RunFile.PRIVATE_REPORT_JSON, RunFile.CHECKPOINTS, RunFile.TENSORBOARD,
    )
)  # fmt: skip
"""Files and folders that the guarantee does not cover: measured on data, or secret."""
