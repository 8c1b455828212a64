"""The networks of the speed benchmark: Lipschitz ones, and their plain ReLU twins."""

from torch import nn

from clipless import models
from clipless import nn as lip

IMAGE = (3, 32, 32)
CNN_WIDTHS = {"cnn-130K": 18, "cnn-400K": 32, "cnn-2M": 72}
MODELS = (*CNN_WIDTHS, "resnet", "mixer")


def lipschitz(name: str) -> nn.Sequential:
    """Build a network: the paper's CNN for CIFAR-10 (5 convolutions, 2 dense), and two others."""
    if name == "resnet":
        sizes = {"channels": (32, 64, 128), "blocks": 2, "convolutions": 2, "hidden": 128}
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
    """The same network of torch's layers: as many parameters, ReLU, max pooling, no guard."""
    return _twin(lipschitz(name))


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
