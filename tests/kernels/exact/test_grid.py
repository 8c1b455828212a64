"""What one row adds is below its bound in integers, and nobody else's contribution changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipless.kernels import (
    ExceedanceCount,
    LimitKind,
    Threshold,
    bounded_convolution,
    bounded_linear,
    enforced_convolution,
    enforced_linear,
    row_shares,
    sum_slack,
)
from clipless.kernels.exact import _grid, _weights
from clipless.kernels.exact._products import Windows
from tests.kernels.exact.errors import simulated
from tests.kernels.exact.rows import unusual_rows
from tests.kernels.test_sums import layers, moved

GEOMETRY = ([2, 1], [1, 1], [1, 1], 2)


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    """Sums of integers on the CPU, by the kernels' twin."""
    monkeypatch.setattr(_weights, "_KINDS", {"cpu": "float64"})


def linear_sum(x, cotangent, limit, shares=None):
    return _weights.integer_linear_weight(cotangent, x, limit=limit, shares=shares)


def kernel_sum(x, cotangent, limit, shares=None):
    """Of a convolution of (rows, 6, 7, 5) to (rows, 8, 4, 5)."""
    return _weights.integer_convolution_weight(
        cotangent, x, [3, 3], GEOMETRY, limit=limit, shares=shares
    )


def batch(kind, rows=60, *, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = {linear_sum: ((3, 9), (3, 4)), kernel_sum: ((6, 7, 5), (8, 4, 5))}[kind]
    return [torch.randn(rows, *shape, generator=random) for shape in shapes]


KINDS = [linear_sum, kernel_sum]


def exact(kind, x, cotangent):
    if kind is linear_sum:
        return torch.einsum("bto,bti->boi", cotangent.double(), x.double())
    return torch.stack(
        [
            torch.nn.grad.conv2d_weight(y[None].double(), (8, 3, 3, 3), g[None].double(), *GEOMETRY)
            for y, g in zip(x, cotangent, strict=True)
        ]
    )


@pytest.mark.parametrize("rows", [1024, 65_536])
@pytest.mark.parametrize("kind", ["weight", "positions", "convolution"])
def test_the_worst_order_of_summation(kind, rows):
    """By which float32 sums are moved by 65 times the bound."""
    assert moved(layers(rows)[kind], rows) <= 1 + 1e-12 + rows * (rows + 2) * 2.0**-52
    assert rows * (rows + 2) * 2.0**-52 < 1e-6 < sum_slack(positions=4, rows=rows)


@pytest.mark.parametrize("limit", [1e-4, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_differ_by_one_row_which_is_within_its_bound(kind, limit):
    """Every row is emptied in turn: what is left of the others is the same, bit for bit."""
    x, cotangent = batch(kind)
    x, cotangent = unusual_rows(x), unusual_rows(cotangent.flip(0)).flip(0)
    whole, _ = kind(x, cotangent, limit)
    assert whole.isfinite().all()
    assert whole.any()
    for row in range(len(x)):
        emptied = x.clone(), cotangent.clone()
        emptied[0][row] = emptied[1][row] = 0.0
        difference = whole - kind(*emptied, limit)[0]
        assert torch.linalg.vector_norm(difference) <= limit * (1 + 1e-12), row
        others = torch.zeros_like(x), torch.zeros_like(cotangent)
        others[0][row], others[1][row] = x[row], cotangent[row]
        own, _ = kind(*others, limit)
        assert (difference - own).abs().max() <= 1e-13 * len(x) * limit, row


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_batches_do_not_matter_at_all(kind):
    """Micro-batches, processes and the order of rows: the same sum, bit for bit."""
    x, cotangent = batch(kind)
    whole, _ = kind(x, cotangent, 1.0)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    assert torch.equal(kind(x[order], cotangent[order], 1.0)[0], whole)
    parts = [kind(x[some], cotangent[some], 1.0)[0] for some in order.split(13)]
    assert (sum(parts) - whole).abs().max() <= 1e-13 * 60


def test_integers_are_within_their_bound_and_their_bits():
    """The proof's own words: `||g||^2 ||p||^2 <= square`, of whole numbers."""
    x, cotangent = batch(kernel_sum)
    x, cotangent = unusual_rows(x), unusual_rows(cotangent.flip(0)).flip(0)
    windows = Windows((3, 3), (2, 1), (1, 1))
    for limit in (1e-4, 1e4):
        for shares in (None, torch.rand(60)):
            what = _weights._described(cotangent, x, windows, 2, limit, multiple=8)
            columns, scale, squares = _grid.input_integers(
                x, padding=(1, 1), layout=what.inputs, counts=what.counts
            )
            rows, _ = _grid.cotangent_integers(
                cotangent, scale, squares, what.grid, shares, layout=what.outputs
            )
            patches = torch.nn.functional.unfold(
                columns.flatten(3).permute(0, 3, 1, 2).double(), (3, 3), stride=(2, 1)
            )
            assert torch.equal(patches.square().sum(dim=(1, 2)).long(), squares)
            own = rows.square().flatten(1).sum(dim=1)
            share = 1.0 if shares is None else shares.double().square()
            assert ((own.double() * squares.double()) <= what.grid.square * share).all()
            assert columns.abs().max() <= 127
            assert rows.abs().max() <= 127 * 256
            assert what.grid.unit * what.grid.square**0.5 <= limit


@settings(max_examples=30, deadline=None)
@given(
    scale=st.floats(-30, 30), spread=st.floats(0, 8), limit=st.floats(-8, 8),
    positions=st.integers(1, 9), inputs=st.integers(1, 12), outputs=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_no_row_is_above_its_limit(scale, spread, limit, positions, inputs, outputs, seed):
    """Of any size and any distribution of sizes, one row after the other."""
    random = torch.Generator().manual_seed(seed)

    def entries(size):
        drawn = torch.randn(6, positions, size, generator=random)
        return drawn * torch.exp(spread * torch.randn(drawn.shape, generator=random))

    x, cotangent = entries(inputs), entries(outputs) * 10.0**scale
    for row in range(6):
        alone = slice(row, row + 1)
        found, _ = linear_sum(x[alone], cotangent[alone], 10.0**limit)
        assert torch.linalg.vector_norm(found) <= 10.0**limit


@pytest.mark.parametrize("kind", KINDS)
def test_rows_below_their_bound_keep_their_gradient_and_those_above_get_the_bound(kind):
    x, cotangent = batch(kind, rows=400)
    own = exact(kind, x, cotangent)
    norms = {
        linear_sum: cotangent.flatten(1).norm(dim=1) * x.flatten(1).norm(dim=1),
        kernel_sum: 3 * cotangent.flatten(1).norm(dim=1) * x.flatten(1).norm(dim=1),
    }[kind]
    found, above = kind(x, cotangent, 1.01 * float(norms.max()))
    assert not above.any()
    assert torch.linalg.vector_norm(found - own.sum(0)) <= 0.02 * torch.linalg.vector_norm(
        own.sum(0)
    )
    limit = 0.1 * float(norms.min())
    found, above = kind(x, cotangent, limit)
    assert above.all()
    wide = x.double()
    if kind is kernel_sum:  # patches are counted exactly: less than 9 at the edges
        unfolded = torch.nn.functional.unfold(wide, (3, 3), padding=1, stride=(2, 1))
        sizes = unfolded.flatten(1).norm(dim=1)
    else:
        sizes = wide.flatten(1).norm(dim=1)
    factors = limit / (sizes * cotangent.double().flatten(1).norm(dim=1))
    expected = (own * factors.view(-1, *[1] * (own.ndim - 1))).sum(0)
    error = torch.linalg.vector_norm(found - expected)
    assert error <= 0.02 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_coarse_grids_round_without_bias(size):
    """Gradients far below a step of the grid, which rounding to the nearest would lose."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand(20_000, 6, generator=random)
    cotangent = size * torch.rand(20_000, 100, generator=random)
    found, _ = linear_sum(x, cotangent, 100.0)
    expected = cotangent.double().mT @ x.double()
    ratio = float(found.sum() / expected.sum())
    assert abs(ratio - 1) < 0.02


def test_layers_use_it_in_every_mode():
    """Shares and counts too; without a limit, and within transforms, floats are added up."""
    x, weight = torch.randn(50, 6), torch.randn(4, 6, requires_grad=True)
    cotangent, count = torch.randn(50, 4), ExceedanceCount()

    def gradient(run, clip=None, limit=1.0):
        limits = {} if limit is None else {"weight": limit}
        return torch.autograd.grad(run(x, weight, None, limits, clip), weight, cotangent)[0]

    expected, above = linear_sum(x, cotangent, 1.0)
    count.expect(1, 50)
    eager = gradient(bounded_linear, LimitKind(by_design=True, count=count))
    assert torch.equal(eager, expected.float())
    assert int(count.take()) == int(above.sum()) > 0
    compiled = torch.compile(bounded_linear, backend="aot_eager")
    assert torch.equal(gradient(compiled), expected.float())
    with row_shares(torch.full((50,), 0.5)) as used:
        halves = gradient(bounded_linear)
    assert used.count == 1
    assert torch.allclose(halves, linear_sum(x, cotangent, 1.0, torch.full((50,), 0.5))[0].float())
    plain = gradient(bounded_linear, limit=None)
    torch.testing.assert_close(plain, cotangent.mT @ x)


def test_thresholds_use_it_where_norms_are_upper_bounds():
    x, cotangent = batch(kernel_sum)
    kernel, count = torch.zeros(8, 3, 3, 3, requires_grad=True), ExceedanceCount()
    expected, above = kernel_sum(x, cotangent, 20.0)

    def gradient(limit, exact):
        output = enforced_convolution(
            x, kernel, None, (limit, None), GEOMETRY, transposed=None, exact=exact
        )
        return torch.autograd.grad(output, kernel, cotangent)[0]

    count.expect(1, 60)
    assert torch.equal(gradient(Threshold(20.0, count), False), expected.float())
    assert int(count.take()) == int(above.sum()) > 0
    assert not gradient(Threshold(20.0, only_counted=True), False).any()
    assert not torch.equal(gradient(Threshold(20.0), None), expected.float())
    weight = torch.zeros(4, 9, requires_grad=True)
    y, g = (each[:, 0] for each in batch(linear_sum))
    output = enforced_linear(y, weight, None, (Threshold(2.0), None), exact=None)
    found = torch.autograd.grad(output, weight, g)[0]
    assert torch.equal(found, linear_sum(y, g, 2.0)[0].float())


def test_patches_of_circular_images_are_not_counted_twice():
    """A padded image has some pixels twice; its patches have every pixel nine times."""
    x, cotangent = torch.ones(3, 1, 4, 4), torch.ones(3, 1, 4, 4)
    kernel = torch.zeros(1, 1, 3, 3, requires_grad=True)
    padded = torch.nn.functional.pad(x, [1, 1, 1, 1], mode="circular")
    limit = 3.0 * 4 * 4 * 1.001
    output = bounded_convolution(
        padded, kernel, None, ([1, 1], [0, 0], [1, 1], 1), gain=3.0,
        input_norm=x.flatten(1).norm(dim=1), limits={"weight": limit},
    )  # fmt: skip
    (found,) = torch.autograd.grad(output, kernel, cotangent)
    torch.testing.assert_close(found, torch.full_like(found, 3 * 16.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("positions", [(), (0,), (2, 3)])
def test_empty_batches_and_any_number_of_axes(rows, positions):
    x, cotangent = torch.randn(rows, *positions, 5), torch.randn(rows, *positions, 4)
    found, above = linear_sum(x, cotangent, 1e3)
    assert found.shape == (4, 5)
    assert above.shape == (rows,)
    expected = cotangent.flatten(0, -2).double().mT @ x.flatten(0, -2).double()
    assert torch.linalg.vector_norm(found - expected) <= 0.5
    lines, above = _weights.integer_convolution_weight(
        torch.randn(rows, 4, 6), torch.randn(rows, 2, 6), [3], ([1], [1], [1], 1), limit=1.0,
        shares=None,
    )  # fmt: skip
    assert lines.shape == (4, 2, 3)
    assert above.shape == (rows,)


def test_operators_are_what_compilers_take_them_for():
    x, cotangent = batch(kernel_sum, rows=3)
    torch.library.opcheck(
        torch.ops.clipless.integer_linear_sum, (x[:, :, 0], x[:, :, 1], 1.0, None)
    )
    torch.library.opcheck(
        torch.ops.clipless.integer_convolution_sum,
        (cotangent, x, 1.0, torch.ones(3), [3, 3], *GEOMETRY),
    )


def test_the_error_of_a_batch_is_far_below_its_noise():
    """Of the paper's CNN: `python -m tests.kernels.exact.errors` says how far, layer by layer."""
    (layers,) = simulated(8, scales=(1.0,)).values()
    assert len(layers) == 7
    for layer in layers:
        own, shorter = (
            layer[bits]["error over noise, batch 2,048"]
            for bits in ("8 and 16 bits", "8 and 8 bits")
        )
        assert own < 1e-3
        assert own < shorter


@pytest.mark.parametrize("records", [3, 13])
def test_shares_of_records_in_bfloat16_are_not_rounded_to_it(records):
    shares = ((1 - 2.0**-20) / torch.full((records,), float(records)).double()).float()
    weight = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    x = torch.ones(records, 1, dtype=torch.bfloat16)
    for scale in torch.linspace(0.97, 1.02, 50).tolist():
        y = bounded_linear(x, weight, None, {"weight": 0.01})
        with row_shares(shares):
            (found,) = torch.autograd.grad(y, [weight], torch.full_like(y, 0.01 * scale))
        assert float(found.abs()) <= 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_rows_without_a_gradient_are_not_above_the_limit(kind, limit):
    x, cotangent = batch(kind, 12)
    x[0], cotangent[1], cotangent[2] = 0.0, 0.0, 1e-35
    x[3, 0], cotangent[3] = torch.inf, 0.0
    x[4, 0], cotangent[5, 0] = torch.nan, torch.inf
    _, outside = kind(x, cotangent, limit)
    rest = [limit < 1] * 6
    assert outside.tolist() == [False, False, False, True, True, True, *rest]


@pytest.mark.parametrize("size", [2.0**-exponent for exponent in range(94, 104)])
def test_cotangents_near_the_least_do_not_overflow(size):
    """2^31 over the largest entry was infinite below 2^-97, and integers got another sign."""
    x, cotangent = torch.full((1, 4), 1e20), torch.full((1, 4), size)
    weight, outside = linear_sum(x, cotangent, 1e-30)
    assert bool((weight >= 0).all())
    assert float(weight.norm()) <= 1e-30
    assert bool(outside) == (size >= _grid.LEAST)


def test_limits_too_small_for_a_grid_take_floats():
    with pytest.raises(ValueError, match="limit"):
        _grid.grid_of(limit=1e-310, inputs=4, outputs=4)
    weight = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    y = bounded_linear(torch.ones(2, 4), weight, None, {"weight": 1e-310})
    (found,) = torch.autograd.grad(y, [weight], torch.ones_like(y))
    assert not found.any()
