"""A rule is complete, and belongs to an operation: roundings, rows that stay apart, no names."""

import contextlib

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.bounds import Bound, Product, _rule, register, sensitivity, unregister
from tests.bounds.refused import Code, guarded, refusal, report_of


@contextlib.contextmanager
def rule(target, answer):
    register(target)(lambda site, x: answer(x))
    try:
        yield
    finally:
        unregister(target)


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Pairs(nn.Module):
    """Swaps neighbours of the batch: every value stays, and rows do not."""

    def forward(self, x):
        return x.flip(0)


class Halve(nn.Module):
    def forward(self, x):
        return x / 2


@pytest.mark.parametrize("kind", [Centre, Pairs])
def test_rows_that_meet_are_found_whatever_the_rule_says(kind):
    with rule(kind, lambda x: Bound(2.0, 2 * x.norm, roundings=1, rows_apart=True)):
        message = refusal(guarded(kind()))
    assert message.startswith("1: it mixes rows along the batch axis")


def test_a_rule_that_does_not_state_it_is_refused():
    for stated in ({}, {"rows_apart": False}):
        with rule(Halve, lambda x, stated=stated: Bound(0.5, x.norm / 2, **stated)):
            assert "does not state that rows stay apart" in refusal(guarded(Halve()))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d])
def test_random_masks_are_no_meeting_of_rows(kind):
    shape = (4,) if kind is nn.Dropout else (4, 3)
    report_of(guarded(kind(0.5)).train(), shape)


def test_names_are_no_operations():
    for name in ("relu", "cumsum"):
        with pytest.raises(TypeError, match=r"torch\.Tensor\.relu"):
            register(name)
    assert not any(isinstance(target, str) for target in _rule._RULES)


def test_tensor_methods_are_registered_by_themselves():
    model = guarded(Code(lambda m, x: x.flip(1)))
    assert "register(torch.Tensor.flip)" in refusal(model)
    register(torch.Tensor.flip)(
        lambda site, x, *axes: Bound(1.0, x.norm, roundings=0, rows_apart=True)
    )
    try:
        assert report_of(model).nodes[1].operation == "flip"
    finally:
        unregister(torch.Tensor.flip)


def test_a_replaced_method_has_no_rule(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "relu", lambda self: 100 * self)
    assert "relu" in refusal(guarded(Code(lambda m, x: x.relu())))


def test_roundings_are_part_of_the_report():
    model = guarded(
        lip.SpectralConv2d(1, 4, 3, padding="same"), nn.MaxPool2d(3, 2), nn.Flatten(),
        lip.FrobeniusLinear(16, 3), Code(lambda m, x: torch.cat([x, x, x], 1)),
    )  # fmt: skip
    nodes = sensitivity(model, loss=1.0, input_shape=(1, 6, 6)).nodes
    assert [node.roundings for node in nodes] == [
        0, Product(4, 36, certified=True), 4, 0, Product(1, 16), 2,
    ]  # fmt: skip


def test_pooling_functions_round_as_their_modules_do():
    for module, line in (
        (nn.MaxPool2d(3, 2), lambda m, x: nn.functional.max_pool2d(x, 3, 2)),
        (nn.AvgPool2d(2, 1), lambda m, x: nn.functional.avg_pool2d(x, 2, 1)),
        (nn.AdaptiveAvgPool2d(3), lambda m, x: nn.functional.adaptive_avg_pool2d(x, 3)),
    ):
        found = [report_of(guarded(each), (2, 6, 6)).nodes[1] for each in (module, Code(line))]
        assert found[0].roundings == found[1].roundings > 0
