"""Certified upper bounds of linear operators, and projections onto the sets they define.

Everything named `..._bound` is a proof: the true norm is never larger, rounding included.
"""

from clipless.spectral._bounds import (
    UNIT_ROUNDOFF,
    gram_bound,
    gram_iteration,
    residual_bound,
    spectral_norm_bound,
)
from clipless.spectral._constraints import (
    Certificate,
    Constraint,
    ConvolutionBall,
    EuclideanBall,
    Orthogonal,
    RowBall,
    SpectralBall,
    clip_singular_values,
    orthogonalize,
    project_batched,
)
from clipless.spectral._convolution import fourier_bound, patch_multiplicity

__all__ = [
    "gram_bound",
    "residual_bound",
    "spectral_norm_bound",
    "fourier_bound",
    "patch_multiplicity",
    "orthogonalize",
    "clip_singular_values",
    "Certificate",
    "Constraint",
    "Orthogonal",
    "SpectralBall",
    "ConvolutionBall",
    "EuclideanBall",
    "RowBall",
    "project_batched",
    "UNIT_ROUNDOFF",
    "gram_iteration",
]
