"""Plain convolutional networks, in the manner of LeNet and of VGG."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from clipless import nn as lip
from clipless.models._config import ModelConfig
from clipless.models._parts import convolution, require_stages, with_dense_layer
from clipless.models._registry import register


@dataclass(frozen=True, kw_only=True)
class LeNetConfig(ModelConfig):
    """A small convolutional network: convolution, GroupSort and L2 pooling, twice; one dense layer.

    Args:
        channels: filters of the convolutions, even; after each the image is halved.
        kernel_sizes: the window of each convolution.
        hidden: width of the dense layer, even.
    """

    channels: tuple[int, ...] = (16, 32)
    kernel_sizes: tuple[int, ...] = (5, 3)
    hidden: int = 64

    def __post_init__(self) -> None:
        """Check the sizes as well."""
        super().__post_init__()
        require_stages(self, self.channels, self.hidden)
        if len(self.kernel_sizes) != len(self.channels):
            raise ValueError(
                f"kernel_sizes={self.kernel_sizes} must have one entry for each of "
                f"channels={self.channels}"
            )


@register("lenet", LeNetConfig)
def lenet(config: LeNetConfig) -> nn.Sequential:
    """Build a LeNet-like network."""
    body: list[nn.Module] = []
    channels = config.input_shape[0]
    for filters, kernel_size in zip(config.channels, config.kernel_sizes, strict=True):
        body += convolution(config, channels, filters, kernel_size)
        body.append(lip.ScaledL2NormPool2d(2))
        channels = filters
    return with_dense_layer(config, body, config.channels, config.hidden)


@dataclass(frozen=True, kw_only=True)
class VGGConfig(ModelConfig):
    """Stages of 3 x 3 convolutions with GroupSort, an L2 pooling after each; one dense layer.

    Args:
        channels: filters of the convolutions of each stage, even; after each the image is halved.
        convolutions: how many a stage has.
        hidden: width of the dense layer, even.
    """

    channels: tuple[int, ...] = (16, 32)
    convolutions: int = 2
    hidden: int = 64

    def __post_init__(self) -> None:
        """Check the sizes as well."""
        super().__post_init__()
        require_stages(self, self.channels, self.hidden)


@register("vgg", VGGConfig)
def vgg(config: VGGConfig) -> nn.Sequential:
    """Build a VGG-like network."""
    body: list[nn.Module] = []
    channels = config.input_shape[0]
    for filters in config.channels:
        for _ in range(config.convolutions):
            body += convolution(config, channels, filters, 3)
            channels = filters
        body.append(lip.ScaledL2NormPool2d(2))
    return with_dense_layer(config, body, config.channels, config.hidden)
