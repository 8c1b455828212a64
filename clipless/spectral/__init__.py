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
    certificates_of,
    clip_singular_values,
)
from clipless.spectral._convolution import fourier_bound, patch_multiplicity
from clipless.spectral._projection import (
    Projection,
    orthogonalize,
    project_batched,
)

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
    "Projection",
    "certificates_of",
    "UNIT_ROUNDOFF",
    "gram_iteration",
]
