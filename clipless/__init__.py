"""Differentially private training without clipping.

Networks are written from Lipschitz layers (`clipless.nn`) and ordinary torch parts; the
sensitivity of every parameter is then proved from the architecture (`clipless.bounds`), and
`PrivacyEngine` trains them under a guarantee (`clipless.privacy`).
"""

from typing import TYPE_CHECKING

from clipless._version import __version__ as __version__
from clipless.common import lazy_names

if TYPE_CHECKING:
    from clipless import (  # noqa: F401 (rooms that are no part of `import *`)
        audit,
        bounds,
        data,
        errors,
        images,
        losses,
        models,
        nn,
        privacy,
        report,
        robustness,
        runs,
        sklearn,
        spectral,
        sweeps,
        training,
    )
    from clipless.bounds import clip_products, sensitivity
    from clipless.nn import certify, convert, project, to_torch
    from clipless.privacy import EnforcedBounds, PrivacyEngine, validate


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
    "convert",
    "validate",
    "EnforcedBounds",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
