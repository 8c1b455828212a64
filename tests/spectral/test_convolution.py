"""Convolution certificates against the SVD of the explicit operator."""

import pytest
import torch
from torch.nn import functional as F

from clipless.spectral import fourier_bound, patch_multiplicity


def explicit_operator(
    kernel, size, *, stride=1, dilation=1, groups=1, circular=False, padding=None
):
    """The matrix of the convolution on images of one size, in float64."""
    axes = kernel.ndim - 2
    channels = kernel.shape[1] * groups
    count = channels * size**axes
    basis = torch.eye(count, dtype=torch.float64).reshape(count, channels, *[size] * axes)
    total = dilation * (kernel.shape[-1] - 1)
    before = total // 2 if padding is None else padding
    after = total - total // 2 if padding is None else padding
    basis = F.pad(basis, [before, after] * axes, mode="circular" if circular else "constant")
    convolve = F.conv1d if axes == 1 else F.conv2d
    columns = convolve(basis, kernel.double(), stride=stride, dilation=dilation, groups=groups)
    return columns.flatten(1).T


def adversarial_kernels():
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    spike = torch.zeros(4, 3, 3, 3, dtype=torch.float64)
    spike[1, 2, 0, 1] = 1.0
    checker = torch.tensor([[1.0, -1, 1], [-1, 1, -1], [1, -1, 1]], dtype=torch.float64)
    yield "gaussian", normal
    yield "spike", spike
    yield "box", torch.ones(4, 3, 3, 3, dtype=torch.float64)
    yield "checkerboard", checker.expand(4, 3, 3, 3).clone()
    yield "near duplicates", normal[:1].repeat(4, 1, 1, 1) + 1e-9 * normal
    yield "tiny", 1e-30 * normal
    yield "huge", 1e30 * normal
    yield "zeros", torch.zeros(4, 3, 3, 3, dtype=torch.float64)


KERNELS = list(adversarial_kernels())


@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=[name for name, _ in KERNELS])
def test_fourier_bound_is_never_below_the_operator(name, kernel, dilation, circular):
    size = 6
    bound = fourier_bound(
        kernel, input_size=(size, size), dilation=(dilation, dilation), circular=circular
    ).item()
    for stride in (1, 2, 3):
        operator = explicit_operator(
            kernel, size, stride=stride, dilation=dilation, circular=circular
        )
        top = torch.linalg.svdvals(operator)[0].item()
        assert bound >= top * (1 - 1e-13)
    exact = torch.linalg.svdvals(
        explicit_operator(kernel, size, dilation=dilation, circular=circular)
    )[0].item()
    assert bound <= exact * (1.02 if circular else 1.6) + 1e-40


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_take_the_largest_group(groups):
    kernel = torch.randn(4, 4 // groups, 3, 3, dtype=torch.float64)
    kernel[-1] *= 20
    bound = fourier_bound(kernel, input_size=(5, 5), dilation=(1, 1), groups=groups).item()
    top = torch.linalg.svdvals(explicit_operator(kernel, 5, groups=groups))[0].item()
    assert top <= bound <= 1.2 * top


@pytest.mark.parametrize("padding", [0, 1, 2, 5])
def test_any_zero_padding_is_covered(padding):
    kernel = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    bound = fourier_bound(kernel, input_size=(5, 5), dilation=(1, 1)).item()
    operator = explicit_operator(kernel, 5, padding=padding)
    assert bound >= torch.linalg.svdvals(operator)[0].item()


def test_smaller_images_are_covered_by_the_certificate_of_larger_ones():
    kernel = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    bound = fourier_bound(kernel, input_size=(8, 8), dilation=(1, 1)).item()
    for size in range(1, 9):
        assert bound >= torch.linalg.svdvals(explicit_operator(kernel, size))[0].item() * 0.999999


def test_sequences():
    kernel = torch.randn(3, 2, 5, dtype=torch.float64)
    bound = fourier_bound(kernel, input_size=(9,), dilation=(1,)).item()
    assert bound >= torch.linalg.svdvals(explicit_operator(kernel, 9))[0].item()


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
def test_patch_multiplicity_counts_patches(kernel, stride, dilation):
    """The formula equals a brute-force count of the windows around an inner pixel."""
    pixels = range(200, 200 + stride * dilation)
    counts = [
        sum((pixel - dilation * tap) % stride == 0 for tap in range(kernel)) for pixel in pixels
    ]
    assert patch_multiplicity((kernel,), (stride,), (dilation,)) == max(counts)
