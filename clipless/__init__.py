"""Differentially private training without clipping."""
