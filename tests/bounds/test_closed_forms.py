"""The paper's closed forms for dense networks equal what the walk computes.

A network of T + 1 affine layers with ||W|| <= U and ||b|| <= B, S-Lipschitz activations between
them, inputs of norm X, an L-Lipschitz loss; alpha = S U. Two corrections to the printed formulas
are needed where S differs from 1 and alpha = 1: the recursion z_1 = U X + B, z_(t+1) = S U z_t + B
gives ||h_t|| <= X + t S B, not S X + t S B, and so for the weights.
"""

import math

import pytest
from torch import nn

from clipless import nn as lip
from clipless.bounds import sensitivity

WIDTH, X, LOSS = 4, 1.7, 1.3


def network(depth, norm, bias_norm, slope):
    layers = [lip.BoundedInput(X)]
    for _ in range(depth):
        bias = bias_norm > 0
        layers += [
            lip.SpectralLinear(WIDTH, WIDTH, bias, norm=norm, bias_norm=bias_norm or 1.0),
            lip.GroupSort(2) if slope == 1 else nn.LeakyReLU(slope),
        ]
    return nn.Sequential(*layers[:-1])


def activation_bound(t, U, S, B):
    """Bound of ||h_t||, the t-th activation after its nonlinearity (h_0 is the input)."""
    if t == 0:
        return X
    alpha = S * U
    if math.isclose(alpha, 1):
        return X + t * S * B
    fixed = S * B / (1 - alpha)
    return alpha**t * (X - fixed) + fixed


@pytest.mark.parametrize("bias_norm", [0.0, 0.6])
@pytest.mark.parametrize(
    ("norm", "slope"),
    [(1.0, 1.0), (0.8, 1.0), (1.25, 1.0), (0.5, 2.0), (0.4, 2.0), (1.1, 1.5)],
    ids=["alpha=1", "alpha<1", "alpha>1", "alpha=1, S=2", "alpha<1, S=2", "alpha>1, S=1.5"],
)
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 10, 20])
def test_the_walk_equals_the_closed_form(depth, norm, slope, bias_norm):
    model = network(depth, norm, bias_norm, slope)
    report = sensitivity(model, loss=LOSS, input_shape=(WIDTH,))
    alpha = norm * slope
    total = 0.0
    for t in range(1, depth + 1):
        after = alpha ** (depth - t)  # Jacobian of the logits with respect to z_t
        path = f"{2 * t - 1}"
        weight = LOSS * after * activation_bound(t - 1, norm, slope, bias_norm)
        assert report.gradient_bounds[f"{path}.weight"] == pytest.approx(weight, rel=1e-12)
        total += weight**2
        if bias_norm:
            bias = LOSS * after
            assert report.gradient_bounds[f"{path}.bias"] == pytest.approx(bias, rel=1e-12)
            total += bias**2
    assert report.global_bound == pytest.approx(math.sqrt(total), rel=1e-12)
    assert report.lipschitz == pytest.approx(norm * alpha ** (depth - 1), rel=1e-12)
    output = norm * activation_bound(depth - 1, norm, slope, bias_norm) + bias_norm
    assert report.output_bound == pytest.approx(output, rel=1e-12)


def test_sum_of_squares_for_alpha_one():
    """The paper's series for alpha = S = 1: L^2 (sum over layers of 1 + (X + (t - 1) B)^2)."""
    depth, B = 7, 0.5
    model = network(depth, 1.0, B, 1.0)
    report = sensitivity(model, loss=LOSS, input_shape=(WIDTH,))
    T = depth - 1
    closed = 1 + X**2 + T * (1 + X**2) + B * X * T * (T + 1) + B**2 * T * (T + 1) * (2 * T + 1) / 6
    assert report.global_bound == pytest.approx(LOSS * math.sqrt(closed), rel=1e-12)


def test_network_without_biases_and_alpha_one_has_equal_bounds():
    report = sensitivity(network(9, 1.0, 0.0, 1.0), loss=LOSS, input_shape=(WIDTH,))
    assert set(report.gradient_bounds.values()) == {LOSS * X}
    assert report.global_bound == pytest.approx(LOSS * X * 3)
