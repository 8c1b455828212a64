"""Kernels of single layers: sorting, norms, pooling windows, scaling of rows."""
