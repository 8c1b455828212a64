"""Differentially private training without clipping.

Networks are written from Lipschitz layers (`clipless.nn`) and ordinary torch parts; the
sensitivity of every parameter is then proved from the architecture (`clipless.bounds`), and
`PrivacyEngine` trains them under a guarantee (`clipless.privacy`).
"""

from clipless import bounds, errors, losses, nn, privacy, spectral
from clipless.bounds import clip_products, sensitivity
from clipless.nn import certify, project, to_torch
from clipless.privacy import PrivacyEngine

__version__ = "0.1.0"

__all__ = [
    "PrivacyEngine",
    "nn",
    "losses",
    "bounds",
    "privacy",
    "spectral",
    "errors",
    "sensitivity",
    "clip_products",
    "project",
    "certify",
    "to_torch",
]
