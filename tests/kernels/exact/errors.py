"""What rounding to grids costs a summed gradient, for several numbers of bits.

Of the paper's CNN for 32x32 images (5 convolutions, 2 dense, 0.4M parameters), with proved bounds:
the error of a batch's sum over its size, and over the noise, of a multiplier of 1, that is added.

    python -m tests.kernels.exact.errors
"""

import math
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.nn.grad import conv2d_weight

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.kernels.exact import _grid, _weights

IMAGE = (3, 32, 32)
NOISY_BATCH = 2048


def paper_cnn(width=32):
    """As in benchmarks/_speed_models.py."""
    layers: list[nn.Module] = [lip.BoundedInput(norm=20.0)]
    channels = 3
    for filters, pooled in ((1, False), (1, True), (2, False), (2, True), (4, True)):
        layers += [lip.SpectralConv2d(channels, filters * width, 3, padding="same")]
        layers += [lip.GroupSort(2)]
        layers += [lip.ScaledL2NormPool2d(2)] if pooled else []
        channels = filters * width
    layers += [nn.Flatten(), lip.SpectralLinear(16 * channels, channels), lip.GroupSort(2)]
    return nn.Sequential(*layers, lip.SpectralLinear(channels, 10))


def captured(model, x, y, loss):
    """The layers with weights, with their inputs and the cotangents of their outputs."""
    found = []

    def keep(layer, inputs, output):
        output.retain_grad()
        found.append((layer, inputs[0].detach(), output))

    kinds = (lip.SpectralConv2d, lip.SpectralLinear)
    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, kinds)]
    loss.per_example(model(x), y).sum().backward()
    for hook in hooks:
        hook.remove()
    return [(layer, inputs, output.grad) for layer, inputs, output in found]


def errors(images, labels, *, scale):
    """The error of a summed gradient for several grids, over the bound and over the noise."""
    torch.manual_seed(0)
    model, loss = paper_cnn(), losses.CrossEntropy(tau=10.0)
    report = clipless.sensitivity(model, loss=loss, input_shape=IMAGE)
    names = {module: name for name, module in model.named_modules()}
    rows = []
    for layer, x, cotangent in captured(model, images, labels, loss):
        bound = report.gradient_bounds[names[layer] + ".weight"] / getattr(layer, "scale", 1.0)
        exact = plain_sum(layer, cotangent.double() * scale, x.double())
        found = {
            "layer": names[layer],
            "mean gradient over bound": float(exact.norm() / len(x) / bound),
        }
        for input_bits, cotangent_bits in ((8, 16), (8, 8), (5, 16)):
            with bits(input_bits, cotangent_bits):
                sums = weight_sum(layer, cotangent * scale, x, bound)
            error = float((sums - exact).norm())
            spread = bound * math.sqrt(exact.numel())  # of noise with a multiplier of 1
            found[f"{input_bits} and {cotangent_bits} bits"] = {
                "error of the sum, relative": error / float(exact.norm()),
                "error over noise, batch 2,048": error
                * math.sqrt(NOISY_BATCH / len(x)) / spread,
            }  # fmt: skip
        rows.append(found)
    return rows


@contextmanager
def bits(inputs, cotangents):
    """Other numbers of bits for the twin. (The kernels are made for 8 and 16.)"""
    most = 2 ** (cotangents - 1) - 1
    with (
        mock.patch.dict(_weights._KINDS, {"cpu": "float64"}),
        mock.patch.object(_grid, "LARGEST_INPUT", 2 ** (inputs - 1) - 1),
        mock.patch.object(_grid, "LARGEST_COTANGENT", min(most, _grid.LARGEST_COTANGENT)),
        mock.patch.object(_grid, "_STEPS", _grid._STEPS * most / 2**15),
        mock.patch.object(_grid, "_LEAST_STEPS", _grid._LEAST_STEPS if cotangents > 8 else 4.0),
    ):
        _grid.grid_of.cache_clear()
        yield
    _grid.grid_of.cache_clear()


def geometry_of(layer):
    return list(layer.stride), [p for p, _ in layer.padding], list(layer.dilation), layer.groups


def plain_sum(layer, cotangent, x):
    if isinstance(layer, lip.SpectralConv2d):
        weight = layer.weight.detach().double()
        return conv2d_weight(x, weight.shape, cotangent, *geometry_of(layer))
    return cotangent.mT @ x


def weight_sum(layer, cotangent, x, limit):
    if isinstance(layer, lip.SpectralConv2d):
        return _weights.integer_convolution_weight(
            cotangent, x, layer.kernel_size, geometry_of(layer), limit=limit, shares=None
        )[0]
    return _weights.integer_linear_weight(cotangent, x, limit=limit, shares=None)[0]


def simulated(rows, *, scales):
    """The errors of a batch of random images, whose cotangents are multiplied by each scale."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(rows, *IMAGE, generator=random)
    labels = torch.randint(0, 10, (rows,), generator=random)
    return {scale: errors(images, labels, scale=scale) for scale in scales}


def main():
    for scale, layers in simulated(64, scales=(1.0, 0.01)).items():
        print(f"cotangents times {scale:g}")
        for layer in layers:
            print(layer)


if __name__ == "__main__":
    main()
