"""Models that several test files attack, and the losses that make attacks simple."""

import torch
from torch import nn

from clipless import losses
from clipless import nn as lip


def linear_functional():
    """A 1-Lipschitz loss with any gradient direction: the target says which."""
    return losses.PerExample(
        lambda output, target: (output * target).sum() / target.norm().clamp_min(1e-12),
        lipschitz=1.0,
    )


def mlp():
    return nn.Sequential(
        lip.BoundedInput(1.5),
        lip.SpectralLinear(6, 8, bias=True, bias_norm=0.3),
        lip.GroupSort(2),
        lip.SpectralLinear(8, 8, norm=1.3),
        lip.MaxMin(),
        lip.SpectralLinear(8, 3, bias=True),
    )


def cnn():
    return nn.Sequential(
        lip.BoundedInput(2.0),
        lip.SpectralConv2d(1, 4, 3, stride=2, padding="same", bias=True, bias_norm=0.1),
        lip.GroupSort(2),
        lip.SpectralConv2d(4, 4, 3, padding="same"),
        lip.ScaledL2NormPool2d(2),
        nn.Flatten(),
        lip.SpectralLinear(16, 3),
    )


def residual_cnn():
    def block():
        return nn.Sequential(
            lip.SpectralConv2d(4, 4, 3, padding="same"), lip.MaxMin(), lip.LayerCentering()
        )

    return nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(1, 4, 3, padding="same", padding_mode="circular"),
        lip.Residual(block()),
        lip.Residual(block(), mode="add"),
        lip.ScaledGlobalAvgPool2d(),
        lip.SpectralLinear(4, 3),
    )


class MixerBlock(nn.Module):
    """Token mixing and channel mixing, each around a skip connection, written as plain code."""

    def __init__(self, tokens, channels):
        super().__init__()
        self.tokens = nn.Sequential(
            lip.SpectralLinear(tokens, tokens, bias=True), lip.GroupSort(2, dim=-1)
        )
        self.channels = nn.Sequential(
            lip.SpectralLinear(channels, channels), lip.GroupSort(2, dim=-1)
        )

    def forward(self, x):
        mixed = self.tokens(x.transpose(1, 2)).transpose(1, 2)
        x = 0.5 * (x + mixed)
        return (x + self.channels(x)) / 2


def mixer():
    return nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(1, 4, 2, stride=2),
        nn.Flatten(2),
        MixerBlock(4, 4),
        nn.Flatten(),
        lip.SpectralLinear(16, 3),
    )


class TokenMean(nn.Module):
    """Embedding, mean over tokens, a linear classifier."""

    def __init__(self):
        super().__init__()
        self.embedding = lip.Embedding(7, 6, norm=2.0)
        self.head = lip.SpectralLinear(6, 3)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(dim=1))


def tokens(count, generator):
    drawn = torch.randint(7, (count, 5), generator=generator)
    drawn[::2] = drawn[::2, :1]  # all tokens alike: the worst case of a shared row
    return drawn


MODELS = {
    "mlp": (mlp, (6,), None),
    "cnn with stride and bias": (cnn, (1, 8, 8), None),
    "residual cnn": (residual_cnn, (1, 6, 6), None),
    "mixer": (mixer, (1, 4, 4), None),
    "embedding and mean": (TokenMean, (5,), tokens),
}
