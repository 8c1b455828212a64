"""`ProvedBounds`: settings of bounds that the architecture proves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from clipless.bounds import Shape, clip_products, unwrap_module
from clipless.losses import Loss
from clipless.nn import AffineModule


@dataclass(frozen=True, kw_only=True)
class ProvedBounds:
    """Proved bounds, `bounds="proved"`, with these settings.

    Args:
        product_clip: clip weight gradients at this fraction of their bound (`clip_products`), which
            lowers the noise by it; None leaves the layers as they are.

    Example:
        >>> ProvedBounds(product_clip=0.3).product_clip
        0.3
    """

    product_clip: float | None = None

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if self.product_clip is not None and not 0 < self.product_clip <= 1:
            raise ValueError(f"product_clip must lie in (0, 1], got {self.product_clip!r}")


@contextmanager
def products_clipped(
    module: nn.Module, bounds: Any, *, loss: Loss, input_shape: Shape
) -> Iterator[None]:
    """Clip products as `bounds` says, and undo it if what follows fails."""
    if not isinstance(bounds, ProvedBounds) or bounds.product_clip is None:
        yield
        return
    model = unwrap_module(module)
    layers = [each for each in model.modules() if isinstance(each, AffineModule)]
    before = [(each.weight_clip, each.follow) for each in layers]
    try:
        clip_products(model, fraction=bounds.product_clip, loss=loss, input_shape=input_shape)
        yield
    except BaseException:
        for layer, (limit, follow) in zip(layers, before, strict=True):
            layer.weight_clip = limit
            layer.follow_quantile(follow)
        raise
