"""Parts that several models share, and checks of their sizes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from clipless import nn as lip
from clipless.models._config import ModelConfig


def assemble(config: ModelConfig, body: Iterable[nn.Module], features: int) -> nn.Sequential:
    """Put the input guard before `body`, and the output layer after its (batch, features)."""
    layers: list[nn.Module] = [lip.BoundedInput(config.guard_norm, config.input_mode), *body]
    radius = config.output_bias
    layers.append(
        lip.SpectralLinear(
            features,
            config.classes,
            bias=radius is not None,
            bias_norm=1.0 if radius is None else radius,
            constraint="ball",
        )
    )
    if config.clip_gradient is not None:
        layers.append(lip.ClipGradient(config.clip_gradient))
    return nn.Sequential(*layers)


def dense(config: ModelConfig, features: int, widths: Iterable[int]) -> list[nn.Module]:
    """Linear layers of the given widths, each with GroupSort."""
    layers: list[nn.Module] = []
    for width in widths:
        layers.append(lip.SpectralLinear(features, width, constraint=config.constraint))
        layers.append(lip.GroupSort(2))
        features = width
    return layers


def convolution(
    config: ModelConfig, channels: int, filters: int, kernel_size: int
) -> list[nn.Module]:
    """A convolution that keeps the size of the image, with GroupSort over its channels."""
    layer = lip.SpectralConv2d(
        channels, filters, kernel_size, padding="same", constraint=config.constraint
    )
    return [layer, lip.GroupSort(2)]


def require_even(name: str, *widths: int) -> None:
    """Refuse widths that GroupSort cannot split into pairs."""
    for width in widths:
        if width % 2:
            raise ValueError(
                f"{name} must be even, because GroupSort sorts pairs of channels: got {width}, "
                f"take {width + 1}"
            )


def require_image(config: ModelConfig) -> None:
    """Refuse shapes that are not (channels, height, width)."""
    shape = config.input_shape
    if len(shape) != 3:
        hint = f": for grey images (1, {shape[0]}, {shape[1]})" if len(shape) == 2 else ""
        raise ValueError(f"input_shape must be (channels, height, width), got {shape}{hint}")


def require_stages(config: ModelConfig, channels: tuple[int, ...], hidden: int) -> None:
    """Refuse sizes of which no stages that halve an image, with a dense layer, can be built."""
    require_image(config)
    if not channels:
        raise ValueError("channels must name the filters of at least one stage")
    require_even("every number in channels", *channels)
    require_even("hidden", hidden)
    height, width = config.input_shape[1:]
    most = min(height, width).bit_length() - 1
    if len(channels) > most:
        raise ValueError(
            f"images of {height} x {width} are too small to be halved {len(channels)} times, once "
            f"for every entry of channels={channels}: give it at most {most}"
        )


def with_dense_layer(
    config: ModelConfig, body: list[nn.Module], channels: tuple[int, ...], hidden: int
) -> nn.Sequential:
    """Put guard, one dense layer and output layer around stages that end in `channels[-1]`."""
    height, width = (size >> len(channels) for size in config.input_shape[1:])
    features = channels[-1] * height * width
    return assemble(config, [*body, nn.Flatten(), *dense(config, features, [hidden])], hidden)
