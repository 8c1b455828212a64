import math

import pytest
import torch
import torch.nn.functional as F

from clipless.errors import LabelError
from clipless.losses import PerExample


def log_cosh(output, target):
    return torch.log(torch.cosh(output - target)).sum()


def test_it_is_the_mean_of_the_function_over_examples():
    output, target = torch.randn(6, 3), torch.randn(6, 3)
    expected = torch.stack([log_cosh(o, t) for o, t in zip(output, target, strict=True)])
    torch.testing.assert_close(PerExample(log_cosh, lipschitz=2)(output, target), expected.mean())
    found = PerExample(log_cosh, lipschitz=2).per_example(output, target)
    torch.testing.assert_close(found, expected)


def test_a_library_function_and_scalar_outputs_work():
    output, target = torch.randn(5, 4), torch.arange(5) % 4
    loss = PerExample(F.cross_entropy, lipschitz=math.sqrt(2))
    torch.testing.assert_close(loss(output, target), F.cross_entropy(output, target))
    line = PerExample(torch.nn.L1Loss(), lipschitz=1.0)
    torch.testing.assert_close(line(output[:, 0], output[:, 1]), F.l1_loss(*output[:, :2].T))


def test_the_function_sees_one_example_and_cannot_couple_them(per_example_gradients):
    seen = []

    def greedy(output, target):
        seen.append((tuple(output.shape), tuple(target.shape)))
        return (output - output.mean(dim=0)).square().sum() * target / target.sum()

    loss = PerExample(greedy, lipschitz=1.0, reduction="sum")
    output = torch.randn(6, 3, requires_grad=True)
    target = torch.rand(6) + 1
    (batch,) = torch.autograd.grad(loss(output, target), output)
    assert seen == [((3,), ())]
    torch.testing.assert_close(batch, per_example_gradients(loss, output, target))


def test_the_constant_is_the_claim_for_every_shape():
    loss = PerExample(log_cosh, lipschitz=3)
    assert loss.lipschitz == loss.lipschitz_for((5,)) == loss.lipschitz_for(()) == 3.0
    assert "log_cosh, lipschitz=3.0" in repr(loss)


@pytest.mark.parametrize(
    "function",
    [
        lambda output, target: (output - target).abs(),
        lambda output, target: (output - target).abs().sum().reshape(1),
        lambda output, target: 0.0,
        lambda output, target: (output > target).sum(),
    ],
    ids=["vector", "one_element", "float", "integer"],
)
def test_results_that_are_no_scalars_are_refused(function):
    with pytest.raises(ValueError, match="scalar"):
        PerExample(function, lipschitz=1.0)(torch.zeros(4, 3), torch.zeros(4, 3))


def test_mismatched_batches_are_refused():
    loss = PerExample(log_cosh, lipschitz=1.0)
    for output, target in [((4, 3), (3, 3)), ((4,), ()), ((), ())]:
        with pytest.raises(LabelError, match="one target per example"):
            loss(torch.zeros(output), torch.zeros(target))


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, None])
def test_the_claim_must_be_finite_and_positive(value):
    with pytest.raises(ValueError, match="lipschitz"):
        PerExample(log_cosh, lipschitz=value)


def test_functions_with_parameters_are_refused():
    with pytest.raises(ValueError, match="parameters"):
        PerExample(torch.nn.Bilinear(2, 2, 1), lipschitz=1.0)
    with pytest.raises(ValueError, match="function"):
        PerExample("l1", lipschitz=1.0)
