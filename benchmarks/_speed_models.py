"""The networks of the speed benchmark: Lipschitz ones, their plain ReLU twins, and usual ones."""

import torch
from torch import nn

from clipless import models
from clipless import nn as lip

IMAGE = (3, 32, 32)
CNN_WIDTHS = {"cnn-130K": 18, "cnn-400K": 32, "cnn-2M": 72}
USUAL = ("resnet18-groupnorm", "transformer-20M")
"""Networks of torch's own layers, which are trained with enforced bounds."""
MODELS = (*CNN_WIDTHS, "resnet", "mixer", "resnet18", *USUAL)


def lipschitz(name: str) -> nn.Sequential:
    """Build a network: the paper's CNN for CIFAR-10 (5 convolutions, 2 dense), and two others."""
    if name == "resnet":
        sizes = {"channels": (32, 64, 128), "blocks": 2, "convolutions": 2, "hidden": 128}
        return models.build("resnet", input_shape=IMAGE, classes=10, **sizes)
    if name == "resnet18":
        sizes = {"channels": (64, 128, 256, 512), "blocks": 2, "convolutions": 2, "hidden": 64}
        return models.build("resnet", input_shape=IMAGE, classes=10, **sizes)
    if name == "mixer":
        return models.build(
            "mixer", input_shape=IMAGE, classes=10, patch=4, width=128, blocks=4, skip=True
        )
    width = CNN_WIDTHS[name]
    layers: list[nn.Module] = [lip.BoundedInput(norm=20.0)]
    channels = IMAGE[0]
    for filters, pooled in ((1, False), (1, True), (2, False), (2, True), (4, True)):
        layers += [lip.SpectralConv2d(channels, filters * width, 3, padding="same")]
        layers += [lip.GroupSort(2)]
        layers += [lip.ScaledL2NormPool2d(2)] if pooled else []
        channels = filters * width
    layers += [nn.Flatten(), lip.SpectralLinear(16 * channels, channels), lip.GroupSort(2)]
    return nn.Sequential(*layers, lip.SpectralLinear(channels, 10))


def relu(name: str) -> nn.Module:
    """The network of torch's layers: a twin has as many parameters, ReLU, max pooling, no guard."""
    if name == "resnet18-groupnorm":
        return _resnet18()
    if name == "transformer-20M":
        return Encoder()
    return _twin(lipschitz(name))


class _Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False),
            nn.GroupNorm(16, filters), nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1, bias=False), nn.GroupNorm(16, filters),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if (channels, 1) != (filters, stride):
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False), nn.GroupNorm(16, filters)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet18() -> nn.Sequential:
    """The usual ResNet-18 for images of 32 x 32 pixels, with groups where batches are mixed."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(16, 64)]
    layers += [nn.ReLU()]
    channels = 64
    for filters in (64, 128, 256, 512):
        layers += [_Block(channels, filters, 1 if filters == channels else 2)]
        layers += [_Block(filters, filters, 1)]
        channels = filters
    return nn.Sequential(*layers, _PlaceMean(), nn.Linear(512, 10))


class _PlaceMean(nn.Module):
    """The mean over all places: what `AdaptiveAvgPool2d(1)` computes, without its as_strided_."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class Encoder(nn.Module):
    """A transformer encoder on 64 patches of an image: 6 layers of width 512."""

    def __init__(self, width: int = 512, patch: int = 4) -> None:
        super().__init__()
        self.patch, places = patch, (IMAGE[1] // patch) * (IMAGE[2] // patch)
        self.patches = nn.Linear(IMAGE[0] * patch**2, width)
        waves = torch.arange(places)[:, None] / 10_000 ** (torch.arange(width) / width)
        self.register_buffer("places", torch.cos(waves))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.head(self.body(self.patches(x) + self.places).mean(1))


def _twin(module: nn.Module) -> nn.Module:
    if isinstance(module, lip.SpectralConv2d | lip.SpectralLinear):
        plain = module.to_torch()
        plain.reset_parameters()
        return plain
    if isinstance(module, lip.GroupSort):
        return nn.ReLU()
    if isinstance(module, lip.ScaledL2NormPool2d):
        return nn.MaxPool2d(module.kernel_size)
    if isinstance(module, lip.BoundedInput):
        return nn.Identity()
    for name, child in module.named_children():
        setattr(module, name, _twin(child))
    return module


def parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
