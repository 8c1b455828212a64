"""The network of image recipes: features, standardisation, guard, and one linear layer."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from clipless import nn as lip
from clipless.images._features import ImageFeatures
from clipless.images._rule import ImageRule
from clipless.statistics import ChannelStatistics, decorrelation_matrix, noise_radius


def build_network(
    rule: ImageRule, *, input_shape: tuple[int, int, int], classes: int
) -> nn.Sequential:
    """Return the network on pixels, as a `Sequential` of named parts, statistics not yet known.

    `features`, `standardize`, `mix`, `guard`, `flatten`, `head`, `clip`. With `rule.lipschitz` it
    is that times the head's norm, 1, Lipschitz in pixels.

    Example:
        >>> rule = ImageRule.choose(examples=1000, epsilon=1.0, certified=True)
        >>> network = build_network(rule, input_shape=(3, 8, 8), classes=10)
        >>> network(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 10])
        >>> report = clipless.sensitivity(
        ...     network, loss=clipless.losses.CrossEntropy(), input_shape=(3, 8, 8))
        >>> report.lipschitz <= 1.00001
        True
    """
    features = ImageFeatures(input_shape, mirror=rule.mirror, root=rule.root)
    channels, rows, columns = features.output_shape
    parts: list[tuple[str, nn.Module]] = [
        ("features", features),
        ("standardize", lip.ChannelStandardize(torch.zeros(channels), torch.ones(channels))),
        ("mix", lip.ChannelMix(torch.eye(channels))),
        ("guard", lip.BoundedInput(rule.norm, mode="clip" if rule.lipschitz else "sphere")),
        ("flatten", nn.Flatten()),
        ("head", lip.SpectralLinear(channels * rows * columns, classes, constraint="ball")),
        ("clip", lip.ClipGradient(rule.gradient_clip)),
    ]
    network = nn.Sequential(OrderedDict(parts))
    # Zeros are as good a start as any for one layer, and put no noise of their own on the logits.
    nn.init.zeros_(network.get_submodule("head").weight)  # type: ignore[arg-type]
    return network


def trained_part(network: nn.Sequential) -> nn.Sequential:
    """Return the parts behind the features, which share their layers and names with `network`."""
    names = ("guard", "flatten", "head", "clip")
    return nn.Sequential(OrderedDict((name, network.get_submodule(name)) for name in names))


def standardization(rule: ImageRule, found: ChannelStatistics) -> lip.ChannelStandardize:
    """Return the layer that standardises channels by private statistics, as far as `rule` lets it.

    Channels are divided by a power of their deviation. Means may always be taken off. A divisor
    below 1 / l would cost certificates, so with a constant l channels are only shrunk: to
    `rule.whitening` times the median deviation.
    """
    deviation: Tensor = found.deviation**rule.power
    if rule.lipschitz is not None:
        limit = rule.whitening * deviation.median()
        deviation = (deviation / limit).clamp(min=1.0) / rule.lipschitz
    return lip.ChannelStandardize(found.mean, deviation)


def decorrelation(ridge: float, covariance: Tensor, *, noise: float) -> lip.ChannelMix:
    """Return the layer that decorrelates channels, given their noisy covariance.

    By the inverse root of the covariance, with `ridge` times its trace added to the eigenvalues, or
    if that is more, the largest eigenvalue that its noise makes, of standard deviation `noise` in
    every entry: directions of noise alone are not blown up. Of norm one; a sphere follows.
    """
    variance = float(torch.linalg.eigvalsh(covariance).clamp(min=0).sum())
    added = max(ridge * variance, noise_radius(noise, len(covariance)))
    return lip.ChannelMix(decorrelation_matrix(covariance, added=added))
