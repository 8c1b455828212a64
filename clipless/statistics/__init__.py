"""Private queries on rows: counts, sums, scalings, channel statistics, values, all with noise."""

from clipless.statistics._answers import KeptAnswers
from clipless.statistics._channels import (
    CHANNEL_QUERIES,
    ChannelStatistics,
    channel_query_noise,
    decorrelation_matrix,
    fit_channels,
    fit_covariance,
    noise_radius,
)
from clipless.statistics._private_rows import PrivateRows
from clipless.statistics._scaling import Scaling, fit_scaling, noise_scale, query_noise
from clipless.statistics._values import value_threshold

__all__ = [
    "PrivateRows",
    "KeptAnswers",
    "ChannelStatistics",
    "fit_channels",
    "fit_covariance",
    "CHANNEL_QUERIES",
    "Scaling",
    "channel_query_noise",
    "decorrelation_matrix",
    "fit_scaling",
    "noise_radius",
    "noise_scale",
    "query_noise",
    "value_threshold",
]
