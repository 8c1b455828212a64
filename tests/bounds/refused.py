"""Models to be refused, and what their refusals say."""

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.bounds import sensitivity
from clipless.errors import (
    CliplessError,
    UnsupportedOperationError,
)


class Code(nn.Module):
    """One line of a user's own code, with layers it may call."""

    def __init__(self, line, *layers, **values):
        super().__init__()
        self.line = line
        self.layers = nn.ModuleList(layers)
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.line(self, x)


def guarded(*modules):
    """A model behind an input guard; the first module has the path "1"."""
    return nn.Sequential(lip.BoundedInput(1.0), *modules)


def report_of(model, shape=(4,), **arguments):
    return sensitivity(model, loss=1.0, input_shape=shape, **arguments)


def refusal(model, shape=(4,), *, error=UnsupportedOperationError, **arguments):
    """The message with which a model is refused."""
    with pytest.raises(error) as caught:
        report_of(model, shape, **arguments)
    assert isinstance(caught.value, CliplessError)
    return str(caught.value)


def assert_shows_how_to_register(message, what):
    lines = [line.strip() for line in message.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("@clipless.bounds.register"))
    assert what in lines[start]
    assert lines[start + 1].startswith("def ")
    assert lines[start + 1].endswith("(site, x):")
    assert lines[start + 2] == "return clipless.bounds.Bound("
    assert lines[start + 3] == "lipschitz=..., output=..., roundings=..., rows_apart=...)"


def assert_refused_or_true(model, shape, inputs=None, *, count=8):
    """Every bound of the report holds for these inputs, and no example sees another."""
    model = model.double()
    try:
        report = report_of(model, shape)
    except CliplessError:
        return
    if inputs is None:
        inputs = torch.randn(count, *shape, dtype=torch.float64)
        inputs *= 0.5 / inputs.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
    inputs = inputs.double().requires_grad_()
    outputs = model(inputs)
    names, parameters = (
        zip(*model.named_parameters(), strict=True) if report.parameters else ((), ())
    )
    slack = 1 + 1e-6
    for index, output in enumerate(outputs.flatten(1)):
        assert output.norm() <= report.output_bound * slack
        for cotangent in (output.detach(), torch.ones_like(output)):
            unit = cotangent / cotangent.norm()
            found = torch.autograd.grad(
                (output * unit).sum(), (inputs, *parameters), retain_graph=True, allow_unused=True
            )
            others = torch.arange(len(inputs)) != index
            assert not found[0][others].any(), "another example has a part in this one's gradient"
            assert found[0].norm() <= report.lipschitz * slack
            for name, gradient in zip(names, found[1:], strict=True):
                if gradient is not None and model.get_parameter(name).requires_grad:
                    assert gradient.norm() <= report.gradient_bounds[name] * slack, name
