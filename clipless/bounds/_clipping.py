"""Product clipping for a whole model, as a fraction of the proved bounds."""

from __future__ import annotations

from torch import nn

from clipless.bounds._sensitivity import Shape, sensitivity, unwrap_module
from clipless.losses import Loss
from clipless.nn import AffineModule, FollowQuantile


def clip_products(
    model: nn.Module,
    *,
    fraction: float | None,
    loss: Loss | float,
    input_shape: Shape,
    follow: FollowQuantile | None = None,
) -> dict[str, float]:
    """Clip the weight gradients of all linear and convolution layers at a fraction of their bound.

    Gradients rarely come close to bounds that hold for every example and all weights; clipping
    the few that exceed a fraction of it lowers the noise by that fraction. The bounds themselves
    remain the cap: a fraction of 1 changes nothing. `None` takes the clipping off. With `follow`,
    the private engine moves every limit after every step, from `fraction` on, so that a quantile
    of the examples stays below it.

    Returns:
        The limits set, by parameter name (of a layer used k times: for each use).

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(2.0), clipless.nn.SpectralLinear(8, 2))
        >>> clip_products(model, fraction=0.25, loss=1.0, input_shape=(8,))
        {'1.weight': 0.5}
    """
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction!r}")
    model = unwrap_module(model)
    layers = {
        f"{path}.weight" if path else "weight": module
        for path, module in model.named_modules()
        if isinstance(module, AffineModule)
    }
    for layer in layers.values():
        layer.weight_clip = None
        layer.follow_quantile(None)
    if fraction is None:
        return {}
    report = sensitivity(model, loss=loss, input_shape=input_shape)
    limits = {}
    for parameter in report.parameters:
        if parameter.name in layers and parameter.uses and parameter.gradient_bound > 0:
            limit = fraction * parameter.gradient_bound / parameter.uses
            layers[parameter.name].weight_clip = limits[parameter.name] = limit
            layers[parameter.name].follow_quantile(follow)
    return limits
