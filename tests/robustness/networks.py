"""Networks that are certified and attacked, each with the shape of its inputs."""

import torch
from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.robustness import Normalize, colour_transform


def mlp():
    return nn.Sequential(
        lip.BoundedInput(4.0),
        lip.SpectralLinear(6, 16, bias=True),
        lip.GroupSort(2),
        lip.SpectralLinear(16, 12, norm=1.5),
        nn.ReLU(),
        lip.SpectralLinear(12, 4, bias=True, constraint="ball"),
    )


def clipped_mlp():
    """Most inputs lie outside of the guard's ball."""
    return nn.Sequential(
        lip.BoundedInput(0.7), lip.SpectralLinear(6, 16, bias=True), lip.MaxMin(),
        lip.FrobeniusLinear(16, 3),
    )  # fmt: skip


def sphere_mlp():
    return nn.Sequential(
        lip.BoundedInput(1.0, mode="sphere"), lip.SpectralLinear(6, 16, bias=True),
        lip.GroupSort(2), lip.SpectralLinear(16, 3), lip.ClipGradient(0.01),
    )  # fmt: skip


def cnn():
    return nn.Sequential(
        lip.BoundedInput(3.0),
        lip.SpectralConv2d(1, 4, 3, padding="same", bias=True, bias_norm=0.2),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(4, 8, 3, stride=2, padding="same"),
        nn.Flatten(),
        lip.SpectralLinear(32, 3),
    )


def residual_cnn():
    return nn.Sequential(
        lip.BoundedInput(2.0, mode="sphere"),
        lip.SpectralConv2d(1, 4, 3, padding="same", padding_mode="circular"),
        lip.Residual(nn.Sequential(lip.SpectralConv2d(4, 4, 3, padding="same"), lip.MaxMin())),
        nn.MaxPool2d(2),
        lip.Residual(nn.Sequential(lip.LayerCentering(), lip.GroupSort(2)), mode="add"),
        lip.ScaledGlobalAvgPool2d(),
        lip.SpectralLinear(4, 3, bias=True),
    )


class Squeeze(nn.Module):
    def forward(self, x):
        return x.squeeze(1)


def binary():
    return nn.Sequential(
        lip.BoundedInput(5.0), lip.SpectralLinear(6, 8), lip.GroupSort(2),
        nn.Dropout(0.5), lip.SpectralLinear(8, 1, bias=True), Squeeze(),
    )  # fmt: skip


def in_raw_units():
    """Pixels from 0 to 255, normalised and taken to another colour space before the guard."""
    return nn.Sequential(
        Normalize(mean=[120.0, 110.0, 100.0], std=[60.0, 50.0, 70.0]),
        colour_transform(
            matrix=[[0.3, 0.6, 0.1], [-0.2, -0.4, 0.5], [0.6, -0.5, -0.1]], offset=[0.1, 0.2, 0.3]
        ),
        lip.BoundedInput(1.0, mode="sphere"),
        lip.SpectralConv2d(3, 4, 2, stride=2),
        lip.GroupSort(2),
        nn.Flatten(),
        lip.SpectralLinear(16, 3),
    )


def unguarded():
    return nn.Sequential(
        lip.SpectralLinear(6, 8, bias=True), nn.Tanh(), lip.SpectralLinear(8, 3), nn.GELU()
    )


NETWORKS = {
    "mlp": (mlp, (6,), 2.0),
    "mlp behind a narrow guard": (clipped_mlp, (6,), 2.0),
    "mlp on the sphere": (sphere_mlp, (6,), 2.0),
    "cnn": (cnn, (1, 8, 8), 0.3),
    "residual cnn on the sphere": (residual_cnn, (1, 8, 8), 1.0),
    "raw pixels": (in_raw_units, (3, 4, 4), 60.0),
    "without guard or linear head": (unguarded, (6,), 2.0),
}


def inputs(shape, scale, count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, *shape, generator=generator)
    return x + 110.0 if scale == 60.0 else x


def trained(model, x, steps=25):
    """Train a little, on labels that a random direction gives."""
    classes = model.eval()(x).shape[-1]
    scores = x.flatten(1) @ torch.randn(x[0].numel(), classes)
    y = (scores - scores.mean(dim=0)).argmax(1)
    criterion = losses.CrossEntropy(tau=10.0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        clipless.project(model, include_frozen=False)
    return model
