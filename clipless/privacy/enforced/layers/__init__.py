"""Layers with thresholds: the table, and the families that are in it."""
