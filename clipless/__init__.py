"""Differentially private training without clipping.

Networks are written from Lipschitz layers (`clipless.nn`) and ordinary torch parts; the
sensitivity of every parameter is then proved from the architecture (`clipless.bounds`).
"""

from clipless import bounds, errors, losses, nn, spectral
from clipless.bounds import sensitivity
from clipless.nn import certify, project, to_torch

__version__ = "0.1.0"

__all__ = [
    "nn",
    "losses",
    "bounds",
    "spectral",
    "errors",
    "sensitivity",
    "project",
    "certify",
    "to_torch",
]
