"""The graph of a model is remembered: what it depends on must be looked at each time."""

import functools
import types

import pytest
import torch
from torch import nn

from clipless.errors import (
    CliplessError,
)
from tests.bounds.refused import Code, assert_refused_or_true, guarded, report_of


class Settings:
    def __init__(self):
        self.scale = 1.0


class ClassScale(nn.Module):
    scale = 1.0

    def forward(self, x):
        return x * self.scale


def set_item(value, key, to):
    value[key] = to


STALE = {
    "attribute": (Code(lambda m, x: x * m.scale, scale=1.0), lambda m: setattr(m, "scale", 10.0)),
    "list": (Code(lambda m, x: x * m.k[0], k=[1.0]), lambda m: set_item(m.k, 0, 10.0)),
    "dictionary": (
        Code(lambda m, x: x * m.k["a"], k={"a": 1.0}),
        lambda m: set_item(m.k, "a", 10.0),
    ),
    "object": (
        Code(lambda m, x: x * m.s.scale, s=Settings()),
        lambda m: setattr(m.s, "scale", 10.0),
    ),
    "namespace": (
        Code(lambda m, x: x * m.s.scale, s=types.SimpleNamespace(scale=1.0)),
        lambda m: setattr(m.s, "scale", 10.0),
    ),
    "set": (Code(lambda m, x: x * len(m.k), k={1}), lambda m: m.k.update(range(10))),
    "partial": (
        Code(lambda m, x: m.f(x), f=functools.partial(torch.mul, other=1.0)),
        lambda m: setattr(m, "f", functools.partial(torch.mul, other=10.0)),
    ),
    "class attribute": (ClassScale(), lambda m: setattr(ClassScale, "scale", 10.0)),
    "training mode": (
        Code(lambda m, x: x if m.training else 10 * x),
        lambda m: m.eval(),
    ),
    "tensor attribute": (
        Code(lambda m, x: x * m.t, t=torch.ones(1)),
        lambda m: m.t.fill_(10.0),
    ),
    "number read from a tensor": (
        Code(lambda m, x: x * float(m.t), t=torch.ones(())),
        lambda m: m.t.fill_(10.0),
    ),
    "function of a tensor": (
        Code(lambda m, x: x * m.t.exp(), t=torch.zeros(())),
        lambda m: m.t.fill_(3.0),
    ),
}


@pytest.mark.parametrize("name", list(STALE))
def test_changes_after_the_first_report_are_seen(name):
    block, change = STALE[name]
    model = guarded(block)
    try:
        assert report_of(model).lipschitz == pytest.approx(1.0)
    except CliplessError:
        return
    change(block)
    try:
        assert_refused_or_true(model, (4,))
    finally:
        ClassScale.scale = 1.0


class Buffered(nn.Module):
    def __init__(self, line):
        super().__init__()
        self.register_buffer("gain", torch.zeros(()))
        self.line = line

    def forward(self, x):
        return self.line(x, self.gain)


@pytest.mark.parametrize(
    "line",
    [
        lambda x, gain: x * gain,
        lambda x, gain: x + gain,
        lambda x, gain: x * gain.exp(),
        lambda x, gain: x * (gain + 1),
        lambda x, gain: x * float(gain + 1),
        lambda x, gain: 10 * x if bool(gain > 1) else x,
    ],
)
def test_buffers_that_change_are_seen(line):
    model = guarded(Buffered(line))
    try:
        report_of(model)
    except CliplessError:
        return
    model[1].gain.fill_(5.0)
    assert_refused_or_true(model, (4,))


def test_a_function_that_takes_the_place_of_another():
    """Compared by address alone, a new function can look like the old one it replaced."""
    block = Code(lambda m, x: m.f(x), f=None)
    model = guarded(block)
    for _ in range(20):
        block.f = eval("lambda x: x * 1.0")
        assert report_of(model).lipschitz == 1.0
        block.f = torch.relu
        block.f = eval("lambda x: x * 10.0")
        assert report_of(model).lipschitz == 10.0


def test_a_forward_redefined_on_the_class_is_seen():
    class Redefined(nn.Module):
        def forward(self, x):
            return x

    model = guarded(Redefined())
    assert report_of(model).lipschitz == 1.0
    Redefined.forward = lambda self, x: 10 * x
    assert_refused_or_true(model, (4,))
