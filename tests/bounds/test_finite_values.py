"""Rules refuse whatever makes infinities or NaN of finite numbers, and admit what does not."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless import nn as lip
from clipless.bounds import sensitivity
from clipless.errors import UnsupportedOperationError
from tests.bounds.refused import Code, guarded, refusal

# Activations -----------------------------------------------------------------------------------

OVERFLOWING = {
    "Softplus(threshold=1000)": nn.Softplus(threshold=1000),
    "Softplus(threshold=89)": nn.Softplus(threshold=89),
    "Softplus(threshold=inf)": nn.Softplus(threshold=math.inf),
    "Softplus(beta=3, threshold=100)": nn.Softplus(3, 100),
    "Softplus(beta=1e-39)": nn.Softplus(1e-39),
    "Softplus(beta=inf)": nn.Softplus(math.inf),
    "F.softplus": Code(lambda m, x: F.softplus(x, 1.0, 1000.0)),
    "F.softplus, by name": Code(lambda m, x: F.softplus(x, beta=2.0, threshold=90.0)),
    "ELU(3e38)": nn.ELU(3e38),
    "F.elu": Code(lambda m, x: F.elu(x, 1e30)),
    "LeakyReLU(3e38)": nn.LeakyReLU(3e38),
    "times 1e39": Code(lambda m, x: x * 1e39),
    "over 1e-40": Code(lambda m, x: x / 1e-40),
    "plus 1e39": Code(lambda m, x: x + 1e39),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_what_overflows_is_refused(name):
    message = refusal(guarded(OVERFLOWING[name], lip.SpectralLinear(4, 2)))
    assert "1" in message.split(":")[0] or "in the forward of 1" in message


def test_a_guard_whose_norms_have_no_squares_is_refused():
    """The derivative of GELU, in torch's tanh approximation, is NaN at 1e20."""
    for norm in (1e19, 1e30, 1e38):
        layers = [lip.BoundedInput(norm), nn.GELU("tanh"), lip.SpectralLinear(4, 2)]
        with pytest.raises(UnsupportedOperationError, match="float32 overflows"):
            sensitivity(nn.Sequential(*layers), loss=1.0, input_shape=(4,))


ADMITTED = {
    "softplus": nn.Softplus(),
    "softplus, steep": nn.Softplus(1e15, 20),
    "softplus, late": nn.Softplus(0.5, 80),
    "softplus, flat": nn.Softplus(1e-15, 80),
    "elu": nn.ELU(1e3),
    "leaky": nn.LeakyReLU(-1e3),
    "gelu": nn.GELU(),
    "gelu, tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "relu6": nn.ReLU6(),
    "over a small number": Code(lambda m, x: x / 1e-3),
}


@pytest.mark.parametrize("name", ADMITTED)
def test_what_is_admitted_stays_finite_at_every_admitted_size(name):
    """Inputs of all sizes up to the largest norm for which a bound is given."""
    layer = ADMITTED[name]
    norm = 1e14
    model = nn.Sequential(lip.BoundedInput(norm), layer, lip.SpectralLinear(1, 1))
    sensitivity(model, loss=1.0, input_shape=(1,))
    sizes = torch.cat([torch.logspace(-45, 14, 2000), torch.linspace(0, 200, 20_001)])
    x = torch.cat([sizes, -sizes]).requires_grad_()
    values = layer(x)
    (slopes,) = torch.autograd.grad(values.sum(), x)
    assert torch.isfinite(values).all()
    assert torch.isfinite(slopes).all()


# Maximum over windows --------------------------------------------------------------------------


def holds_a_cell(size, kernel, stride, padding, dilation, ceil_mode):
    """Whether torch's maxima over a sequence of zeros, backwards not tried, are all finite."""
    pooled = F.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, dilation, ceil_mode)
    return bool(torch.isfinite(pooled).all())


def forms(kernel, stride, padding, dilation, ceil_mode):
    """The same pooling as modules and functions, along a sequence, rows and columns."""
    settings = (kernel, stride, padding, dilation)
    rows = ((kernel, 1), (stride, 1), (padding, 0), (dilation, 1))
    yield nn.MaxPool1d(*settings, ceil_mode=ceil_mode), (1,)
    yield nn.MaxPool2d(*rows, ceil_mode=ceil_mode), (1, -1, 1)
    columns = [pair[::-1] for pair in rows]
    yield Code(lambda m, x: F.max_pool2d(x, *columns, ceil_mode=ceil_mode)), (1, 1)
    yield Code(lambda m, x: F.max_pool1d(x, *settings, ceil_mode=ceil_mode)), (1,)


def with_size(shape, size):
    return tuple(size if n == -1 else n for n in (shape if -1 in shape else (*shape, size)))


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_windows_in_padding_alone_are_refused_and_no_others(kernel, dilation):
    refused = 0
    sizes, strides, paddings = (1, 2, 3, 4, 5), (1, 2, 3), range(kernel // 2 + 1)
    for size, stride, padding, ceil in itertools.product(sizes, strides, paddings, (False, True)):
        try:
            sound = holds_a_cell(size, kernel, stride, padding, dilation, ceil)
        except RuntimeError:  # torch has no such pooling
            continue
        for pool, shape in forms(kernel, stride, padding, dilation, ceil):
            model = guarded(pool, nn.Flatten())
            arguments = {"loss": 1.0, "input_shape": with_size(shape, size)}
            if sound:
                sensitivity(model, **arguments)
                continue
            with pytest.raises(UnsupportedOperationError, match="lies in the padding alone"):
                sensitivity(model, **arguments)
            refused += 1
    assert (refused > 0) == ((kernel, dilation) in {(2, 2), (2, 3), (2, 4), (3, 2)})
