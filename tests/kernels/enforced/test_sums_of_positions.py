"""What cancels within examples rounds nobody else's contribution, and examples are exact sums."""

import pytest
import torch

from clipless.kernels import ExceedanceCount, Threshold, enforced_convolution, enforced_linear


def linear_gradient(x, cotangent, limit):
    weight = torch.zeros(cotangent.shape[-1], x.shape[-1], requires_grad=True)
    output = enforced_linear(x, weight, None, (limit, None), exact=None)
    return torch.autograd.grad(output, weight, cotangent)[0].double()


def kernel_gradient(x, cotangent, limit, *, transposed=None, groups=1):
    """Of a convolution with a window of one place: a linear layer on each."""
    x, cotangent = x.mT, cotangent.mT
    shape = (cotangent.shape[1], x.shape[1] // groups, 1)
    if transposed is not None:
        shape = (x.shape[1], cotangent.shape[1] // groups, 1)
    kernel = torch.zeros(shape, requires_grad=True)
    output = enforced_convolution(
        x, kernel, None, (limit, None), ([1], [0], [1], groups), transposed=transposed, exact=None
    )
    return torch.autograd.grad(output, kernel, cotangent)[0].double()


def transposed_gradient(x, cotangent, limit):
    return kernel_gradient(x, cotangent, limit, transposed=[0])


@pytest.mark.parametrize("gradient", [linear_gradient, kernel_gradient, transposed_gradient])
@pytest.mark.parametrize("size", [1, 8])
def test_large_positions_that_cancel_do_not_lift_the_sum_over_a_power_of_two(gradient, size):
    """Each of 36 rows adds almost nothing: -0.75 spacings, and a large number and its opposite.

    With one row more, intermediate sums lie above a power of two, where small numbers are lost.
    In float32 sums over several rows that moved the result by 2.09 thresholds.
    """
    for exponent in range(4, 24):
        large, spacing = 2.0**exponent - 0.5, 2.0 ** (exponent - 24)
        x, cotangent = torch.zeros(2, 37, 3, size)
        cotangent[:, :, 0] = 1
        x[1:, :, 0] = torch.tensor([-0.75 * spacing, large, -large])
        empty = x.clone()
        x[0, 0, 0] = 1.0
        moved = gradient(x, cotangent, Threshold(1.0)) - gradient(empty, cotangent, Threshold(1.0))
        assert torch.linalg.vector_norm(moved) <= 1 + 1e-5, exponent


@pytest.mark.parametrize(
    ("positions", "outputs", "inputs"), [(2, 12, 9), (40, 90, 100), (50, 3, 4), (1, 5, 6)]
)  # by inner products, by examples though positions are few, by examples, one position
def test_sums_are_those_of_scaled_examples(positions, outputs, inputs):
    generator = torch.Generator().manual_seed(0)
    rows = 300
    x = torch.randn(rows, positions, inputs, generator=generator)
    cotangent = torch.randn(rows, positions, outputs, generator=generator)
    x[3], cotangent[4, 0, 0], x[5] = torch.inf, torch.nan, 0.0
    own = cotangent.double().mT @ x.double()
    norms = torch.linalg.matrix_norm(own)
    limit, count = float(norms[6:].median()), ExceedanceCount()
    count.expect(1, rows)
    factors = (limit / norms.clamp(min=limit)).nan_to_num(0.0)
    expected = (
        torch.where(norms.isfinite()[:, None, None], own, 0.0) * factors[:, None, None]
    ).sum(0)
    found = linear_gradient(x, cotangent, Threshold(limit, count))
    assert torch.linalg.vector_norm(found - expected) <= 2e-3 * rows**0.5 * limit
    assert (
        abs(float(count.take()) - 149) <= 3
    )  # half of those that are finite, and two that are not
    counted = kernel_gradient(x, cotangent, Threshold(limit, count, only_counted=True))
    assert not counted.any()
    for transposed in (None, [0]):
        kernel = kernel_gradient(x, cotangent, Threshold(limit), transposed=transposed)[..., 0]
        kernel = kernel if transposed is None else kernel.mT
        assert torch.linalg.vector_norm(kernel - expected) <= 2e-3 * rows**0.5 * limit


@pytest.mark.parametrize("positions", [2, 40])
def test_groups_of_channels_share_a_threshold(positions):
    generator = torch.Generator().manual_seed(0)
    x, cotangent = torch.randn(2, 6, positions, 40, generator=generator)
    own = [
        torch.cat([g.mT @ y for g, y in zip(c.split(20, -1), z.split(20, -1), strict=True)], 0)
        for c, z in zip(cotangent.double(), x.double(), strict=True)
    ]
    expected = sum(each / each.norm() for each in own)
    found = kernel_gradient(x, cotangent, Threshold(1.0), groups=2)[..., 0]
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=1e-4)
