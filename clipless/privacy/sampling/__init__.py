"""Sampling of the examples of each step, and the private data loader."""
