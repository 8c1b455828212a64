"""Private queries on rows: counts, sums, scalings, channel statistics, values, all with noise."""

from clipless.statistics._channels import ChannelStatistics, fit_channels, fit_covariance
from clipless.statistics._private_rows import PrivateRows

__all__ = ["PrivateRows", "ChannelStatistics", "fit_channels", "fit_covariance"]
