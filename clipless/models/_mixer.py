"""The MLP-Mixer: an image as patches, mixed across patches and across channels in turn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from clipless import nn as lip
from clipless.models._config import ModelConfig
from clipless.models._parts import assemble, require_even, require_image
from clipless.models._registry import register


@dataclass(frozen=True, kw_only=True)
class MixerConfig(ModelConfig):
    """An MLP-Mixer of square orthogonal layers, which preserves norms up to its output layer.

    One linear layer takes every patch to `width` channels. Each block mixes the patches of every
    channel, then the channels of every patch, by Linear, GroupSort, Linear, with weights shared
    over channels or patches.

    Args:
        patch: height and width of a patch; must divide the image.
        width: channels of a patch, even.
        blocks: how many times patches and channels are mixed. Few are best: bounds get looser
            with depth.
        tokens: width of the mixing across patches, even; by default the number of patches, rounded
            up.
        skip: put `(x + f(x)) / 2` around every mixing.
    """

    patch: int = 4
    width: int = 64
    blocks: int = 1
    tokens: int | None = None
    skip: bool = False

    def __post_init__(self) -> None:
        """Check the sizes as well."""
        super().__post_init__()
        require_image(self)
        _, height, width = self.input_shape
        if height % self.patch or width % self.patch:
            raise ValueError(f"patch={self.patch} does not divide the image of {height} x {width}")
        require_even("width", self.width)
        if self.tokens is not None:
            require_even("tokens", self.tokens)

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        _, height, width = self.input_shape
        return (height // self.patch) * (width // self.patch)


class Transposed(nn.Module):
    """`block` on examples whose two axes are swapped: (batch, a, b) is mixed along a, not b."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """(batch, a, b) -> (batch, a, b), for a block from (batch, b, a) to itself."""
        mixed: Tensor = self.block(x.transpose(1, 2))
        return mixed.transpose(1, 2)


@register("mixer", MixerConfig)
def mixer(config: MixerConfig) -> nn.Sequential:
    """Build an MLP-Mixer. Between its blocks, examples are (width, patches)."""
    patches, patch = config.patches, config.patch
    embedding = lip.SpectralConv2d(
        config.input_shape[0], config.width, patch, stride=patch, constraint=config.constraint
    )
    body: list[nn.Module] = [embedding, nn.Flatten(2)]
    for _ in range(config.blocks):
        across_patches = _mixing(config, patches, config.tokens or patches + patches % 2)
        across_channels = Transposed(_mixing(config, config.width, config.width))
        for block in (across_patches, across_channels):
            body.append(lip.Residual(block) if config.skip else block)
    return assemble(config, [*body, nn.Flatten()], config.width * patches)


def _mixing(config: MixerConfig, size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        lip.SpectralLinear(size, hidden, constraint=config.constraint),
        lip.GroupSort(2, dim=-1),
        lip.SpectralLinear(hidden, size, constraint=config.constraint),
    )
