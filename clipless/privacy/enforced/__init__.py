"""Enforced bounds: thresholds for every layer of any network whose examples stay apart."""
