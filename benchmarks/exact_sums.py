"""Exact sums of weight gradients: what one costs on a GPU, beside sums of floats.

One weight gradient in TF32, in float32, float64 or bfloat16, and as a sum of integers (in all:
rounding to the grids and products, these by either kind), of dense layers and of convolutions.

    python benchmarks/exact_sums.py [--quick]
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _results import save
from torch import Tensor

from clipless.kernels import (
    integer_convolution_weight,
    integer_linear_weight,
    prepare_integer_sums,
)

DENSE = [(8192, 512, 512), (32_768, 384, 384), (32_768, 1536, 384), (131_072, 384, 1536)]
"""Rows, outputs, inputs."""
CONVOLUTIONS = [(3, 32, 32), (32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8)]
"""Channels in and out, and the size of the image; 3x3, 8,192 images."""
IMAGES = 8192


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
        prepare_integer_sums("cuda", kind)
        found[f"integers, {kind} products"] = milliseconds(work)
    return found


def dense_times(rows: int, outputs: int, inputs: int) -> dict[str, Any]:
    cotangent = torch.randn(rows, outputs, device="cuda")
    x = torch.randn(rows, inputs, device="cuda")
    with tf32(True):
        found = {"tf32": milliseconds(lambda: cotangent.mT @ x)}
    found["float32"] = milliseconds(lambda: cotangent.mT @ x)
    found["float64"] = milliseconds(lambda: cotangent.double().mT @ x.double())
    found |= integer_times(lambda: integer_linear_weight(cotangent, x, limit=1e3, shares=None))
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
        lambda: integer_convolution_weight(cotangent, x, [3, 3], geometry, limit=1e3, shares=None)
    )
    return {"layer": f"3x3 convolution, {inputs} to {outputs}, {size}x{size}", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest shapes only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none")
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
