"""The known traps, each by an explicit construction: the naive formula fails, ours holds.

Every test builds one example whose gradient (or output, or Jacobian) exceeds what a tempting but
wrong formula claims, and shows that the sensitivity report, or the layer, stays above it.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless import nn as lip
from clipless.bounds import sensitivity
from clipless.errors import CliplessError, UnsupportedOperationError
from clipless.losses import CrossEntropy
from tests.nn.operators import jacobian_norm, norm_of, singular_values

SLACK = 1 + 1e-9


def report_of(model, shape, loss=1.0):
    return sensitivity(model, loss=loss, input_shape=shape)


def gradients(model, x, cotangent=None):
    """Gradient norms of one example's loss <cotangent, output>, by parameter; unit by default."""
    output = model(x[None])
    cotangent = output.detach() if cotangent is None else cotangent.reshape(output.shape)
    (output * cotangent / cotangent.norm()).sum().backward()
    found = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def unit(*shape):
    """A constant image of norm one."""
    image = torch.ones(*shape, dtype=torch.float64)
    return image / image.norm()


# Contract, section 2 ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 28])
def test_a_bias_shared_over_positions_has_a_jacobian_of_their_root(size):
    """Naive: 1. On a 28 x 28 map the bias' gradient is 28 times that."""
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 1, 3, padding="same", bias=True)
    ).double()
    found = gradients(model, unit(1, size, size), torch.ones(1, size, size))["1.bias"]
    assert found == pytest.approx(size)
    assert found > 1.0
    assert found <= report_of(model, (1, size, size)).gradient_bounds["1.bias"] * SLACK


def test_a_bias_shared_over_tokens_has_a_jacobian_of_their_root():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(3, 2, bias=True)).double()
    found = gradients(model, unit(9, 3), torch.eye(2)[0].expand(9, 2))["1.bias"]
    assert found == pytest.approx(3.0)
    assert found <= report_of(model, (9, 3)).gradient_bounds["1.bias"] * SLACK


def test_the_bias_enters_the_output_bound_at_every_position():
    """Naive: X + ||b||. A bias of norm 1 adds its norm at each of 16 positions."""
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralConv2d(1, 1, 1, bias=True)).double()
    with torch.no_grad():
        model[1].weight.fill_(1.0)
        model[1].bias.fill_(1.0)
    lip.project(model)
    found = model(unit(1, 4, 4)[None]).norm().item()
    assert found > 4.9 > 1 + 1
    assert found <= report_of(model, (1, 4, 4)).output_bound * SLACK


@pytest.mark.parametrize(("kernel", "size", "excess"), [(3, 10, 1.01), (3, 28, 1.015)])
def test_the_usual_convolution_coefficient_passes_one(kernel, size, excess):
    """Naive: patch counts averaged over the image, border included. Box kernels reach 1.02."""
    half = (kernel - 1) / 2
    usual = size / (kernel * size - half * (half + 1))
    box = torch.full((1, 1, kernel), kernel**-0.5, dtype=torch.float64)  # one axis of k x k
    operator = norm_of(lambda x: F.conv1d(x, box, padding=kernel // 2), (1, size)) ** 2
    assert operator * usual > excess
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 1, kernel, padding="same")
    ).double()
    assert operator * model[1].scale <= report_of(model, (1, size, size)).lipschitz


def test_the_usual_convolution_coefficient_on_a_tiny_image_reaches_one_and_a_half():
    taps = torch.zeros(7, dtype=torch.float64)
    taps[2:5] = torch.tensor([1.0, 2.0, 1.0])
    kernel = torch.outer(taps, taps)
    kernel = (kernel / kernel.norm())[None, None]
    usual = 2 / (7 * 2 - 3 * 4)
    operator = norm_of(lambda x: F.conv2d(x, kernel, padding=3), (1, 2, 2))
    assert operator * usual == pytest.approx(1.5)
    layer = lip.SpectralConv2d(1, 1, 7, padding="same").double()
    with torch.no_grad():
        layer.weight.copy_(kernel)
    layer.project()
    assert norm_of(layer, (1, 2, 2)) <= 1


@pytest.mark.parametrize(("kernel", "excess"), [(3, 2.8), (5, 4.5), (7, 6.1)])
def test_the_coefficient_inside_the_stored_kernel_does_not_lower_its_gradient(kernel, excess):
    """Naive: coefficient times patches, about 1, though the coefficient is in the kernel already.

    For the kernel that is convolved with, the gradient on a constant image is about its width. We
    store the unit-scale kernel, for which the factor 1 is true.
    """
    size = 28
    half = (kernel - 1) / 2
    usual = size / (kernel * size - half * (half + 1))
    claimed = usual * kernel
    assert 1 < claimed < 1.2
    image = unit(1, size, size)
    effective = torch.zeros(1, 1, kernel, kernel, dtype=torch.float64, requires_grad=True)
    cotangent = unit(1, 1, size, size)
    (F.conv2d(image[None], effective, padding=kernel // 2) * cotangent).sum().backward()
    assert effective.grad.norm() > excess
    assert effective.grad.norm() > 2 * claimed

    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 1, kernel, padding="same")
    ).double()
    found = gradients(model, image, cotangent)["1.weight"]
    bound = report_of(model, (1, size, size)).gradient_bounds["1.weight"]
    assert 0.85 * bound < found <= bound * SLACK


@pytest.mark.parametrize(
    ("activation", "naive", "value"),
    [(nn.Sigmoid(), 0.25, 0.5), (nn.Softplus(), 1.0, math.log(2)), (nn.Softplus(3.0), 1.0, None)],
    ids=repr,
)
def test_activations_that_do_not_map_zero_to_zero(activation, naive, value):
    """Naive: l X. At the zero example the output, and the next weight's gradient, are not zero."""
    radius = 0.01
    model = nn.Sequential(lip.BoundedInput(radius), activation, lip.SpectralLinear(16, 16)).double()
    zero = torch.zeros(16, dtype=torch.float64)
    output = model[:2](zero[None]).norm().item()
    assert output > 10 * naive * radius
    if value is not None:
        assert output == pytest.approx(4 * value)
    report = report_of(model, (16,))
    assert gradients(model, zero)["2.weight"] == pytest.approx(output)
    assert output <= report.gradient_bounds["2.weight"] * SLACK


def test_sigmoid_saturates_at_the_root_of_the_size():
    model = nn.Sequential(lip.BoundedInput(1e3), nn.Sigmoid())
    x = torch.full((1, 16), 250.0)
    assert report_of(model, (16,)).output_bound == pytest.approx(4.0)
    assert model(x).norm() <= 4.0 * (1 + 1e-6)


def test_clipping_thresholds_are_compared_before_the_division():
    """Naive: min(L / b, C) is b times too large: thresholds belong to one example's loss."""
    constant, threshold, batch = math.sqrt(2), 0.1, 64
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(4, 4),
        lip.ClipGradient(threshold, loss_scale=1 / batch),
    ).double()
    bound = report_of(model, (4,), CrossEntropy()).gradient_bounds["1.weight"]
    assert bound == pytest.approx(min(constant, threshold))
    assert min(constant / batch, threshold) > 2 * min(constant, threshold) / batch
    x = torch.eye(4, dtype=torch.float64).repeat(batch // 4, 1)
    labels = torch.arange(batch) % 4
    (CrossEntropy(tau=50.0, reduction="sum")(-50 * model(x), labels) / batch).backward()
    # All examples together, each at most threshold / batch.
    assert model[1].weight.grad.norm() <= batch * bound / batch * SLACK
    assert model[1].weight.grad.norm() > 0.4 * bound


def test_a_clip_layer_bounds_what_comes_before_it_only():
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(4, 4),
        lip.ClipGradient(0.1),
        lip.SpectralLinear(4, 4),
    ).double()
    bounds = report_of(model, (4,)).gradient_bounds
    found = gradients(model, unit(4))
    assert bounds == pytest.approx({"1.weight": 0.1, "3.weight": 1.0})
    assert found == pytest.approx(bounds)


@pytest.mark.parametrize(
    ("padding", "stride", "size", "excess"),
    [((1, 1), 4, 6, math.sqrt(2)), ((7, 7), 1, 8, math.sqrt(3))],
)
def test_padding_that_duplicates_pixels_breaks_the_patch_count(padding, stride, size, excess):
    """Naive: any circular padding. In two dimensions the excess squares: 2 and 3."""
    layer = lip.SpectralConv1d(1, 3, 3, stride=stride).double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3)[:, None])  # the patches themselves
    layer.project()
    duplicated = norm_of(lambda x: layer(F.pad(x, padding, mode="circular")), (1, size))
    assert duplicated == pytest.approx(excess, rel=1e-6)
    assert norm_of(layer, (1, size)) <= SLACK
    if sum(padding) == 2:
        unsound = lip.SpectralConv1d(1, 3, 3, stride, "same", padding_mode="circular")
        with pytest.raises(UnsupportedOperationError, match="circular"):
            report_of(nn.Sequential(lip.BoundedInput(1.0), unsound), (1, size))
    else:
        with pytest.raises(ValueError, match="circular"):
            lip.SpectralConv1d(1, 3, 3, stride, padding[0], padding_mode="circular")


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_by_reflection_or_replication_breaks_the_patch_count(mode):
    layer = lip.SpectralConv1d(1, 5, 5).double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(5)[:, None])
    layer.project()
    assert norm_of(lambda x: layer(F.pad(x, (2, 2), mode=mode)), (1, 3)) > 1.08
    with pytest.raises(ValueError, match="padding_mode"):
        lip.SpectralConv1d(1, 5, 5, padding=2, padding_mode=mode)


def test_average_pooling_that_does_not_count_its_padding_reaches_twice_its_row():
    """Naive: sqrt(m / w) = 1/2. Corner windows hold one pixel and divide by one."""
    pool = nn.AvgPool2d(2, padding=1, count_include_pad=False)
    assert norm_of(pool, (1, 2, 2)) == pytest.approx(2 * 0.5)
    with pytest.raises(UnsupportedOperationError, match="count_include_pad=True"):
        report_of(nn.Sequential(lip.BoundedInput(1.0), pool), (1, 2, 2))
    counted = nn.Sequential(lip.BoundedInput(1.0), nn.AvgPool2d(2, padding=1))
    assert norm_of(counted[1], (1, 2, 2)) <= report_of(counted, (1, 2, 2)).lipschitz * SLACK


def test_average_pooling_in_ceil_mode_divides_by_fewer_cells():
    pool = nn.AvgPool1d(4, ceil_mode=True)
    assert norm_of(pool, (1, 5)) == pytest.approx(2 * 0.5)
    with pytest.raises(UnsupportedOperationError, match="ceil_mode=False"):
        report_of(nn.Sequential(lip.BoundedInput(1.0), pool), (1, 5))


def test_groups_take_the_largest_groups_norm():
    """Naive: the first group, or the mean of all. One group alone can carry the whole norm."""
    layer = lip.SpectralConv2d(4, 4, 1, groups=4, constraint="ball").double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.1, 0.1, 0.1, 3.0]).reshape(4, 1, 1, 1))
    norms = layer.weight.detach().flatten().abs()
    operator = norm_of(layer, (4, 2, 2))
    assert operator == pytest.approx(3.0)
    assert operator > 3 * norms.mean()
    assert layer.certificate().bound >= operator
    layer.project()
    assert norm_of(layer, (4, 2, 2)) <= SLACK


def test_sorting_at_exact_ties_keeps_a_jacobian_of_one():
    """Naive: separate maximum and minimum reductions send both cotangents to one entry: 1.41."""

    def naive(x):
        pairs = x.unflatten(1, (-1, 2))
        return torch.stack([pairs.min(-1).values, pairs.max(-1).values], -1).flatten(1)

    tie = torch.ones(2, dtype=torch.float64)
    assert jacobian_norm(naive, tie) == pytest.approx(math.sqrt(2))
    layers = [lip.GroupSort(2), lip.MaxMin(), lip.FullSort(), lip.Householder(2).double()]
    for layer in layers:
        assert jacobian_norm(layer, tie) <= SLACK
        model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(2, 2), layer).double()
        with torch.no_grad():
            model[1].weight.copy_(torch.tensor([[0.6, 0.8], [0.8, -0.6]]))
        lip.project(model)
        bound = report_of(model, (2,)).gradient_bounds["1.weight"]
        first_tie = torch.tensor([7.0, 1.0], dtype=torch.float64)
        first_tie /= first_tie.norm()
        for cotangent in torch.randn(20, 2, dtype=torch.float64):
            assert gradients(model, first_tie, cotangent)["1.weight"] <= bound * SLACK


def test_pooling_maxima_at_exact_ties():
    model = nn.Sequential(lip.BoundedInput(1.0), nn.MaxPool2d(3, stride=1)).double()
    bound = report_of(model, (1, 5, 5)).lipschitz
    assert bound == pytest.approx(3.0)
    for image in (torch.zeros(1, 5, 5), torch.ones(1, 5, 5) / 10):
        assert jacobian_norm(model[1], image.double()) <= bound * SLACK
    spike = torch.zeros(1, 5, 5).double()
    spike[0, 2, 2] = 0.5
    assert jacobian_norm(model[1], spike) == pytest.approx(3.0)  # naive: 1


def test_a_layer_used_twice_adds_its_bounds():
    """Naive: the larger of the two uses. Gradients of a shared weight add."""
    shared = lip.SpectralLinear(3, 3)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard, self.shared = lip.BoundedInput(1.0), shared

        def forward(self, x):
            return self.shared(self.shared(self.guard(x)))

    model = Twice().double()
    with torch.no_grad():
        shared.weight.copy_(torch.eye(3))
    lip.project(model)
    found = gradients(model, torch.eye(3, dtype=torch.float64)[0])["shared.weight"]
    assert found > 1.99
    assert found <= report_of(model, (3,)).gradient_bounds["shared.weight"] * SLACK


def test_a_weight_shared_by_two_layers_adds_its_bounds():
    first, second = lip.SpectralLinear(3, 3), lip.SpectralLinear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(lip.BoundedInput(1.0), first, second).double()
    with torch.no_grad():
        first.weight.copy_(torch.eye(3))
    lip.project(model)
    bounds = report_of(model, (3,)).gradient_bounds
    assert list(bounds) == ["1.weight"]
    found = gradients(model, torch.eye(3, dtype=torch.float64)[0])["1.weight"]
    assert 1.99 < found <= bounds["1.weight"] * SLACK


def test_repeated_tokens_add_in_the_table():
    """Naive: 1. A sentence of one word repeated T times has a gradient of sqrt(T)."""
    model = nn.Sequential(lip.Embedding(5, 3)).double()
    output = model(torch.full((1, 16), 2))
    output.backward(torch.ones_like(output) / math.sqrt(output.numel()))
    found = model[0].weight.grad.norm().item()
    assert found == pytest.approx(4.0)
    assert found <= report_of(model, (16,)).gradient_bounds["0.weight"] * SLACK


# Where the reference implementation's guarantee breaks -------------------------------------------


def test_centering_over_the_batch_ties_examples_together():
    """Naive centering of rank-2 tensors averages over the batch: 2.4 times the claim was found.

    Ours centres every example by itself: what another example holds changes nothing.
    """
    weight = torch.eye(4, dtype=torch.float64)

    def gradient_of_first(center, others):
        free = weight.clone().requires_grad_()
        batch = torch.cat([torch.eye(4, dtype=torch.float64)[:1], others])
        center(batch @ free.T)[0].norm().backward()
        return free.grad

    def naive(x):
        return x - x.mean(dim=0, keepdim=True)

    quiet = torch.zeros(1, 4, dtype=torch.float64)
    loud = -5 * torch.eye(4, dtype=torch.float64)[:1]
    assert gradient_of_first(naive, loud).norm() > 2.4  # one example of norm 1
    layer = lip.LayerCentering()
    torch.testing.assert_close(gradient_of_first(layer, loud), gradient_of_first(layer, quiet))
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 4), layer).double()
    bound = report_of(model, (4,)).gradient_bounds["1.weight"]
    for rank in ((4,), (3, 4)):
        x = torch.randn(*rank, dtype=torch.float64)
        x /= x.norm()
        assert gradients(model, x)["1.weight"] <= bound * SLACK


def test_power_iteration_alone_leaves_a_norm_above_one():
    """Naive: divide by a few power iterations' estimate, which converges from below."""
    torch.manual_seed(1)
    q = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    values = torch.linspace(1.5, 0.5, 64, dtype=torch.float64)
    weight = q * values @ torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    vector = torch.ones(64, dtype=torch.float64)
    for _ in range(2):
        vector = weight.T @ (weight @ vector)
        vector = vector / vector.norm()
    estimate = (weight @ vector).norm()
    assert singular_values(weight / estimate)[0] > 1.07
    for constraint in ("orthogonal", "ball"):
        layer = lip.SpectralLinear(64, 64, constraint=constraint).double()
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.project()
        assert singular_values(layer.weight)[0] <= 1
        assert layer.certificate().bound >= singular_values(layer.weight)[0]


def test_layers_inside_residual_blocks_are_constrained_too():
    """Left out of the projection they reached 3.2; left out of the certificate, nobody noticed."""
    inner = lip.SpectralLinear(4, 4)
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.Residual(nn.Sequential(inner, lip.MaxMin())), nn.Flatten()
    )
    with torch.no_grad():
        inner.weight.mul_(3.2)
    with pytest.raises(CliplessError, match=r"1\.block\.0\.weight"):
        report_of(model, (4,))
    lip.project(model)
    assert singular_values(inner.weight)[0] <= 1
    assert report_of(model, (4,)).gradient_bounds.keys() == {"1.block.0.weight"}


def test_equal_names_lose_no_layer():
    """Naive: a table by a layer's own name. Every parameter of the model is in the report, once."""
    block = nn.ModuleDict({"linear": lip.SpectralLinear(4, 4)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = lip.BoundedInput(1.0)
            self.left, self.right = block, copy.deepcopy(block)
            self.stack = nn.Sequential(nn.Sequential(lip.SpectralLinear(4, 4)))

        def forward(self, x):
            x = self.guard(x)
            return self.stack(self.left["linear"](x) + self.right["linear"](x))

    model = Net()
    report = report_of(model, (4,))
    assert set(report.gradient_bounds) == {name for name, _ in model.named_parameters()}
    assert report.gradient_bounds == pytest.approx(
        {"left.linear.weight": 1.0, "right.linear.weight": 1.0, "stack.0.0.weight": 2.0}
    )
    assert report.global_bound == pytest.approx(math.sqrt(1 + 1 + 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-45, 3e38])
def test_one_bad_record_changes_nothing_but_its_own_part(value):
    """Naive: no guard. A single NaN turns every weight into NaN at the next step."""
    torch.manual_seed(0)
    layers = [lip.SpectralLinear(4, 8), lip.GroupSort(2), lip.SpectralLinear(8, 3)]
    model = nn.Sequential(lip.BoundedInput(1.0), *layers)
    loss = CrossEntropy(reduction="sum")
    good, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    bad = torch.cat([good, torch.full((1, 4), value)])
    if not math.isfinite(value):
        unguarded = nn.Sequential(*layers)
        loss(unguarded(bad), torch.cat([labels, labels[:1]])).backward()
        assert torch.isnan(layers[0].weight.grad).any()

    def summed(x, y):
        model.zero_grad()
        loss(model(x), y).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    bounds = report_of(model, (4,), loss).gradient_bounds
    with_it, without = summed(bad, torch.cat([labels, labels[:1]])), summed(good, labels)
    for name, bound in bounds.items():
        assert (with_it[name] - without[name]).norm() <= bound * (1 + 1e-5)
