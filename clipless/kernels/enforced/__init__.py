"""Layers of any network whose backward pass holds every example's gradient to a threshold."""
