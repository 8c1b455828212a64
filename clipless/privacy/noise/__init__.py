"""Noise: how it is shared out among parameters, and noise that remembers earlier steps."""
