"""Compiled runs to test, with a backend that needs no compiler.

`aot_eager` traces forward and backward pass and partitions them as the default backend does.
"""

from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from tests.privacy.runs import Run

BACKEND = "aot_eager"
PRECISIONS = ["float32", "bfloat16"]


def compiled(model=None, **options):
    """A compiled run, whose batches have one size unless the options say otherwise."""
    options.setdefault("compile", BACKEND)
    if options.get("pad") is not False:
        options.setdefault("sizes", 1)
    return Run(model, **options)


def clipped():
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 8), lip.GroupSort(2),
        lip.SpectralLinear(8, 3, bias=True), lip.ClipGradient(0.2),
    )  # fmt: skip
    clipless.clip_products(model, fraction=0.3, loss=losses.CrossEntropy(), input_shape=(6,))
    return model
