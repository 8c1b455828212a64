"""One example moves a computed sum by its bound and the stated slack, whatever the others are."""

import pytest
import torch

from clipless.kernels import (
    SUM_SLACK,
    Threshold,
    bounded_convolution,
    bounded_embedding,
    bounded_linear,
    convolution_weight,
    enforced_convolution,
    enforced_copies,
    enforced_embedding,
    enforced_linear,
    enforced_scale_shift,
    linear_weight,
    per_example_parameter,
    row_sum,
    sum_slack,
)

SIZES = [1024, 16_384, 65_536]


def hostile(rows):
    """Contributions that float32 adds up worst: ones, then just below half a spacing of their sum.

    One more at the start lifts the sum over a power of two, where all that follow are lost.
    """
    half = rows // 2  # a power of two
    values = torch.full((rows,), -0.75 * half * 2.0**-24)
    values[: half + 1] = 1.0
    return values


def moved(function, rows):
    """How far emptying the first row moves a sum of rows that are 1 at most."""
    values = hostile(rows)
    emptied = values.clone()
    emptied[0] = 0.0
    return torch.linalg.vector_norm(function(values).double() - function(emptied).double()).item()


def gradient(layer, parameter):
    """The gradient of a sum over rows, as a private step takes it: for a float64 leaf."""
    leaf = parameter.to(torch.float64).requires_grad_()

    def of(values):
        output = layer(leaf)
        cotangent = values.view(-1, *[1] * (output.ndim - 1)).expand_as(output)
        return torch.autograd.grad(output, leaf, cotangent / cotangent[0].numel() ** 0.5)[0]

    return of


def layers(rows):
    x = torch.ones(rows, 1)
    image = torch.ones(rows, 1, 1, 2) / 2**0.5
    tokens = torch.zeros(rows, 1, dtype=torch.long)
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    kernel = torch.ones(1, 1, 1, 1)
    none = torch.zeros(1)
    return {
        "weight": gradient(
            lambda w: bounded_linear(x, w, None, {"weight": 1.0}), torch.ones(1, 1)
        ),
        "bias": gradient(
            lambda b: bounded_linear(x, torch.ones(1, 1), b, {"bias": 1.0}), none
        ),
        "positions": gradient(
            lambda w: bounded_linear(torch.ones(rows, 4, 1) / 2, w, None, {"weight": 1.0}),
            torch.ones(1, 1),
        ),
        "convolution": gradient(
            lambda w: bounded_convolution(
                image, w, None, geometry, gain=1.0, input_norm=None, limits={"weight": 1.0}
            ),
            kernel,
        ),
        "embedding": gradient(
            lambda w: bounded_embedding(tokens, w, {"weight": 1.0}, torch.float32),
            torch.ones(1, 1),
        ),
        "scale": gradient(lambda p: per_example_parameter(p, rows, 1.0, torch.float32), none),
    }  # fmt: skip


def enforced_layers(rows):
    """Layers of any network, whose examples are held to a threshold of 1."""
    one = Threshold(1.0)
    x, tokens = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.long)
    image = torch.ones(rows, 1, 1, 2) / 2**0.5
    geometry = ([1, 1], [0, 0], [1, 1], 1)

    def convolution(exact, transposed=None):
        return gradient(
            lambda w: enforced_convolution(
                image, w, None, (one, None), geometry, transposed=transposed, exact=exact
            ),
            torch.ones(1, 1, 1, 1),
        )

    found = {
        "weight": gradient(
            lambda w: enforced_linear(x, w, None, (one, None), exact=None), torch.ones(1, 1)
        ),
        "bias": gradient(
            lambda b: enforced_linear(x, torch.ones(1, 1), b, (None, one), exact=None),
            torch.zeros(1),
        ),
        "embedding": gradient(
            lambda w: enforced_embedding(
                tokens, w, one, padding=-1, exact=None, dtype=torch.float32
            ),
            torch.ones(1, 1),
        ),
        "scale": gradient(
            lambda p: enforced_scale_shift(x, p, None, (one, None), axis=1), torch.ones(1)
        ),
        "shift": gradient(
            lambda p: enforced_scale_shift(x, None, p, (None, one), axis=1), torch.zeros(1)
        ),
        "a parameter alone": gradient(
            lambda p: enforced_copies(p, rows, one, torch.float32), torch.zeros(1)
        ),
        "transposed convolution": convolution(None, transposed=[0, 0]),
    }
    for exact in (True, False):
        found[f"positions, {exact}"] = gradient(
            lambda w, exact=exact: enforced_linear(
                torch.ones(rows, 4, 1) / 2, w, None, (one, None), exact=exact
            ),
            torch.ones(1, 1),
        )
        found[f"convolution, {exact}"] = convolution(exact)
    return found


@pytest.mark.parametrize("kind", sorted(layers(1)))
@pytest.mark.parametrize("rows", SIZES)
def test_the_worst_order_of_summation(kind, rows):
    """Float32 sums let one row move the sum by 1.01, 5.0 and 65 times its bound."""
    allowed = 1 + 1e-4 + sum_slack(positions=4, rows=rows)
    assert moved(layers(rows)[kind], rows) <= allowed
    assert allowed < 1.001


@pytest.mark.parametrize("rows", SIZES)
def test_the_worst_order_of_summation_in_layers_with_thresholds(rows):
    """For float64 leaves, as a private step has them."""
    for kind, layer in enforced_layers(rows).items():
        assert moved(layer, rows) <= 1 + 1e-4 + sum_slack(positions=4, rows=rows), kind


@pytest.mark.parametrize("pieces", [2, 7, 64])
def test_the_worst_order_of_micro_batches_and_processes(pieces):
    """Each piece's sum is float64, and they are added up as float64 numbers, in any order."""
    rows = 65_536

    def of(values):
        sums = [
            linear_weight(each, torch.ones_like(each), None, in_place=False)
            for each in values.unsqueeze(1).tensor_split(pieces)
        ]
        return sum(sums[::-1][1:], start=sums[-1])

    assert moved(of, rows) <= 1 + sum_slack(positions=1, rows=rows)


@pytest.mark.parametrize("rows", SIZES)
def test_the_attack_works_on_float32_sums(rows):
    def one_after_the_other(values):
        return torch.from_numpy(values.numpy().cumsum(dtype="float32"))[-1]

    assert moved(one_after_the_other, rows) > {1024: 1.01, 16_384: 4.9, 65_536: 60}[rows]


@pytest.mark.parametrize("positions", [1, 3, 16, 64, 256, 1024, 5000])
def test_parts_are_as_short_as_the_slack_says(positions):
    assert sum_slack(positions=positions, rows=1000) <= max(SUM_SLACK * 1.01, positions * 2.0**-23)


@pytest.mark.parametrize("shape", [(70, 3), (70, 5, 3), (3, 5000, 2), (1, 3), (0, 3), (0, 4, 3)])
def test_linear_sums_are_right(shape):
    x, g = torch.randn(shape), torch.randn(*shape[:-1], 4)
    expected = g.double().flatten(0, -2).mT @ x.double().flatten(0, -2)
    found = linear_weight(g, x, None, in_place=False)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 1, 9, 40])
def test_convolution_sums_are_right(rows):
    x, g = torch.randn(rows, 3, 8, 8), torch.randn(rows, 4, 8, 8)
    kernel = torch.randn(4, 3, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    found = convolution_weight(g, x, None, kernel, geometry, in_place=False)
    wide = kernel.double().requires_grad_()
    output = torch.nn.functional.conv2d(x.double(), wide, padding=1)
    (expected,) = torch.autograd.grad(output, wide, g.double())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_an_emptied_row_changes_its_own_part_alone():
    """The parts are cut by place: what the other parts add is the same, bit for bit."""
    x, g = torch.randn(256, 7), torch.randn(256, 5)
    emptied = g.clone()
    emptied[100] = 0.0
    whole, without = (linear_weight(each, x, None, in_place=False) for each in (g, emptied))
    part = slice(64, 128)
    expected = linear_weight(g[part], x[part], None, in_place=False) - linear_weight(
        emptied[part], x[part], None, in_place=False
    )
    assert (whole - without - expected).abs().max() < 1e-12


def test_rows_are_added_up_in_float64():
    rows = torch.tensor([[2.0**24], [1.0], [1.0]])
    assert row_sum(rows).item() == 2**24 + 2
    assert rows.sum(0).item() != 2**24 + 2


@pytest.mark.parametrize("order", [list, reversed, lambda parts: sorted(parts, key=float)])
@pytest.mark.parametrize("processes", [2, 8])
@pytest.mark.parametrize("rows", SIZES)
def test_the_worst_order_of_processes_that_share_parameters(rows, processes, order):
    """Sums are rounded to float32, and added up as float32 numbers in an order of their own."""

    def of(values):
        first, *rest = order(
            [each.double().sum().float() for each in values.tensor_split(processes)]
        )
        return sum(rest, start=first)

    assert moved(of, rows) <= 1 + 2 * processes * rows * 2.0**-24
