"""Exact sums of weight gradients: what rounding to grids costs in error, and sums in time.

Times need a GPU. They compare one weight gradient in TF32, in float64, and as sums of integers (in
all: rounding to the grids and products), of dense layers and of convolutions. Errors are simulated
on the CPU, by the kernels' twin, which rounds to the same bits: the error of a batch's summed
gradient, against the noise that is added to it.

    python benchmarks/exact_sums.py           # times, on a GPU
    python benchmarks/exact_sums.py --errors  # errors, for several numbers of bits
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from _results import save
from _speed_models import IMAGE, lipschitz
from torch import Tensor, nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.kernels.exact import _grid, _weights

DENSE = [(8192, 512, 512), (32_768, 384, 384), (32_768, 1536, 384), (131_072, 384, 1536)]
"""Rows, outputs, inputs."""
CONVOLUTIONS = [(3, 32, 32), (32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8)]
"""Channels in and out, and the size of the image; 3x3, 8,192 images."""
IMAGES = 8192
NOISY_BATCH = 2048


def milliseconds(work: Callable[[], object], *, repetitions: int = 20) -> float:
    """The median time of some work on the GPU."""
    times = []
    for turn in range(repetitions + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


@contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Products of float32 numbers in TF32 or not, for a while."""
    kind = "tf32" if wanted else "ieee"
    torch.backends.cuda.matmul.fp32_precision = kind
    torch.backends.cudnn.conv.fp32_precision = kind
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"


def integer_times(work: Callable[[], object]) -> dict[str, float]:
    """The time of a sum of integers, by either kind of product."""
    found = {}
    for kind in ("float16", "int8"):
        if not _weights.sums_are_exact("cuda", kind):
            raise RuntimeError(f"sums of integers by {kind} products are not exact on this GPU")
        with mock.patch.dict(_weights._KINDS, {"cuda": kind}):
            found[f"integers, {kind} products"] = milliseconds(work)
    return found


def dense_times(rows: int, outputs: int, inputs: int) -> dict[str, Any]:
    cotangent = torch.randn(rows, outputs, device="cuda")
    x = torch.randn(rows, inputs, device="cuda")
    with tf32(True):
        found = {"tf32": milliseconds(lambda: cotangent.mT @ x)}
    found["float32"] = milliseconds(lambda: cotangent.mT @ x)
    found["float64"] = milliseconds(lambda: cotangent.double().mT @ x.double())
    found |= integer_times(
        lambda: _weights.integer_linear_weight(cotangent, x, limit=1e3, shares=None)
    )
    return {"layer": f"dense, {rows} x {outputs} x {inputs}", **found}


def convolution_times(inputs: int, outputs: int, size: int) -> dict[str, Any]:
    last = torch.channels_last
    x = torch.randn(IMAGES, inputs, size, size, device="cuda").to(memory_format=last)
    cotangent = torch.randn(IMAGES, outputs, size, size, device="cuda").to(memory_format=last)
    kernel = torch.zeros(outputs, inputs, 3, 3, device="cuda").to(memory_format=last)
    geometry = ([1, 1], [1, 1], [1, 1], 1)

    def by_library(g: Tensor = cotangent, y: Tensor = x, k: Tensor = kernel) -> object:
        stride, padding, dilation, groups = geometry
        return torch.ops.aten.convolution_backward(
            g, y, k, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
        )

    with tf32(True):
        found = {"tf32": milliseconds(by_library)}
    found["float32"] = milliseconds(by_library)
    narrow = [each.bfloat16() for each in (cotangent, x, kernel)]
    found["bfloat16"] = milliseconds(lambda: by_library(*narrow))
    found |= integer_times(
        lambda: _weights.integer_convolution_weight(
            cotangent, x, [3, 3], geometry, limit=1e3, shares=None
        )
    )
    return {"layer": f"3x3 convolution, {inputs} to {outputs}, {size}x{size}", **found}


def captured(model: nn.Module, x: Tensor, y: Tensor, loss: losses.Loss) -> list[Any]:
    """The layers with weights, with their inputs and the cotangents of their outputs."""
    found: list[Any] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        found.append((layer, inputs[0].detach(), output))

    kinds = (lip.SpectralConv2d, lip.SpectralLinear)
    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, kinds)]
    loss.per_example(model(x), y).sum().backward()
    for hook in hooks:
        hook.remove()
    return [(layer, inputs, output.grad) for layer, inputs, output in found]


def errors(images: Tensor, labels: Tensor, *, scale: float) -> list[dict[str, Any]]:
    """The error of a summed gradient for several grids, over the bound and over the noise."""
    torch.manual_seed(0)
    model, loss = lipschitz("cnn-400K"), losses.CrossEntropy(tau=10.0)
    report = clipless.sensitivity(model, loss=loss, input_shape=IMAGE)
    names = {module: name for name, module in model.named_modules()}
    rows = []
    for layer, x, cotangent in captured(model, images, labels, loss):
        bound = report.gradient_bounds[names[layer] + ".weight"] / getattr(layer, "scale", 1.0)
        exact = plain_sum(layer, cotangent.double() * scale, x.double())
        found: dict[str, Any] = {
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
def bits(inputs: int, cotangents: int) -> Iterator[None]:
    """Other numbers of bits for the twin. (The kernels are made for 8 and 16.)"""
    most = 2 ** (cotangents - 1) - 1
    with (
        mock.patch.dict(_weights._KINDS, {"cpu": "float64"}),
        mock.patch.object(_grid, "LARGEST_INPUT", 2 ** (inputs - 1) - 1),
        mock.patch.object(_grid, "LARGEST_COTANGENT", min(most, _grid.LARGEST_COTANGENT)),
        mock.patch.object(_grid, "_STEPS", _grid._STEPS * most / 2**15),
        mock.patch.object(_grid, "_LEAST_STEPS", _grid._LEAST_STEPS if cotangents > 8 else 4.0),
    ):
        yield


def geometry_of(layer: lip.SpectralConv2d) -> Any:
    return list(layer.stride), [p for p, _ in layer.padding], list(layer.dilation), layer.groups


def plain_sum(layer: nn.Module, cotangent: Tensor, x: Tensor) -> Tensor:
    if isinstance(layer, lip.SpectralConv2d):
        weight = layer.weight.detach().double()
        return torch.nn.grad.conv2d_weight(x, weight.shape, cotangent, *geometry_of(layer))
    return cotangent.mT @ x


def weight_sum(layer: nn.Module, cotangent: Tensor, x: Tensor, limit: float) -> Tensor:
    if isinstance(layer, lip.SpectralConv2d):
        return _weights.integer_convolution_weight(
            cotangent, x, layer.kernel_size, geometry_of(layer), limit=limit, shares=None
        )[0]
    return _weights.integer_linear_weight(cotangent, x, limit=limit, shares=None)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--errors", action="store_true", help="errors instead of times")
    parser.add_argument("--rows", type=int, default=64, help="images of which errors are summed")
    parser.add_argument("--quick", action="store_true", help="the smallest shapes only")
    arguments = parser.parse_args()
    if arguments.errors:
        random = torch.Generator().manual_seed(0)
        rows = 8 if arguments.quick else arguments.rows
        images = torch.rand(rows, *IMAGE, generator=random)
        labels = torch.randint(0, 10, (rows,), generator=random)
        results = {
            f"cotangents times {scale:g}": errors(images, labels, scale=scale)
            for scale in ([1.0] if arguments.quick else [1.0, 0.01])
        }
        notes = "Simulated on the CPU: the paper's CNN with 0.4M parameters, random images."
        print(results)
        save("exact-sums-errors", results, notes=notes)
        return
    if not torch.cuda.is_available():
        raise SystemExit("times need a GPU; --errors does not")
    times = []
    for dense in DENSE[:1] if arguments.quick else DENSE:
        times.append(dense_times(*dense))
        print(times[-1])
    for convolution in CONVOLUTIONS[-1:] if arguments.quick else CONVOLUTIONS:
        times.append(convolution_times(*convolution))
        print(times[-1])
    save("exact-sums-gpu", times, notes="Milliseconds of one weight gradient, medians of 20.")


if __name__ == "__main__":
    main()
