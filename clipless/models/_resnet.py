"""A residual network whose skip connections keep it 1-Lipschitz."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from clipless import nn as lip
from clipless.models._config import ModelConfig
from clipless.models._parts import convolution, require_stages, with_dense_layer
from clipless.models._registry import register


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ModelConfig):
    """Stages of residual blocks `(x + f(x)) / 2`, f being 3 x 3 convolutions with GroupSort.

    Every stage begins with a convolution of 2 x 2 windows and stride 2, which halves the image and
    whose patches do not overlap: with four times the filters it would preserve norms exactly. One
    dense layer follows.

    Args:
        channels: filters of each stage, even; at the beginning of each the image is halved.
        blocks: how many residual blocks a stage has.
        convolutions: how many a block has.
        hidden: width of the dense layer, even.
    """

    channels: tuple[int, ...] = (16, 32)
    blocks: int = 1
    convolutions: int = 1
    hidden: int = 64

    def __post_init__(self) -> None:
        """Check the sizes as well."""
        super().__post_init__()
        require_stages(self, self.channels, self.hidden)


@register("resnet", ResNetConfig)
def resnet(config: ResNetConfig) -> nn.Sequential:
    """Build a residual network."""
    body: list[nn.Module] = []
    channels = config.input_shape[0]
    for filters in config.channels:
        body.append(
            lip.SpectralConv2d(channels, filters, 2, stride=2, constraint=config.constraint)
        )
        body.append(lip.GroupSort(2))
        for _ in range(config.blocks):
            layers: list[nn.Module] = []
            for _ in range(config.convolutions):
                layers += convolution(config, filters, filters, 3)
            body.append(lip.Residual(nn.Sequential(*layers)))
        channels = filters
    return with_dense_layer(config, body, config.channels, config.hidden)
