"""What holds for every loss: independence of examples, reductions, derivatives, robustness."""

import doctest
import importlib

import pytest
import torch

from clipless import losses as L
from clipless.losses import Loss


def indices(count, columns):
    return torch.arange(count) % columns


def signs(count, columns):
    return 2 * (torch.arange(count) % 2) - 1


def numbers(count, columns):
    return torch.linspace(-2, 2, count * columns, dtype=torch.float64).reshape(count, columns)


def bits(count, columns):
    return (numbers(count, columns) > 0.3).double()


def smooth(output, target):
    return (1 + (output - target).square().sum()).sqrt()


# name: (loss, number of outputs, targets)
CASES = {
    "cross_entropy": (L.CrossEntropy(tau=3.0), 5, indices),
    "binary_cross_entropy": (L.BinaryCrossEntropy(tau=3.0), 1, bits),
    "multi_label": (L.BinaryCrossEntropy(), 4, bits),
    "cosine": (L.CosineSimilarity(floor=0.5), 5, indices),
    "hinge": (L.MulticlassHinge(), 5, indices),
    "binary_hinge": (L.MulticlassHinge(), 1, signs),
    "kr": (L.KantorovichRubinstein(), 5, indices),
    "binary_kr": (L.KantorovichRubinstein(), 1, signs),
    "hinge_kr": (L.HingeKR(alpha=5.0), 5, indices),
    "binary_hinge_kr": (L.HingeKR(alpha=5.0), 1, signs),
    "absolute": (L.AbsoluteError(), 3, numbers),
    "huber": (L.Huber(delta=0.7), 3, numbers),
    "squared": (L.SquaredError(output_bound=1.0, target_bound=2.0), 3, numbers),
    "per_example": (L.PerExample(smooth, lipschitz=1.0), 3, numbers),
}
every_loss = pytest.mark.parametrize(("loss", "columns", "targets"), CASES.values(), ids=CASES)
RARE = ["cross_entropy", "cosine", "hinge", "binary_hinge", "kr", "binary_kr", "hinge_kr"]


def outputs(count, columns, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, columns, generator=generator, dtype=dtype)


def batch_gradient(loss, output, target):
    output = output.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss.per_example(output, target).sum(), output)
    return found


@every_loss
def test_examples_do_not_meet(loss, columns, targets):
    output, target = outputs(40, columns), targets(40, columns)
    together = batch_gradient(loss, output, target)
    alone = [batch_gradient(loss, output[i : i + 1], target[i : i + 1]) for i in range(40)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-14)
    others = torch.cat([output[:1], 1e6 * outputs(39, columns)])
    torch.testing.assert_close(batch_gradient(loss, others, target)[0], together[0])


@pytest.mark.parametrize("name", RARE)
def test_a_rare_class_in_a_batch_of_256_keeps_its_bound(name):
    loss, columns, targets = CASES[name]
    output, target = outputs(256, columns), targets(2, 2)[:1].repeat(256)
    target[17] = targets(2, 2)[1]
    norms = batch_gradient(loss, output, target).norm(dim=1)
    assert norms.max() <= loss.lipschitz_for((columns,)) * (1 + 1e-9)
    alone = batch_gradient(loss, output[17:18], target[17:18]).norm()
    torch.testing.assert_close(norms[17], alone)


def test_weighting_by_class_counts_would_have_been_noticed():
    """The usual batch form of the loss: mean over one class minus mean over the other."""

    class Coupled(L.KantorovichRubinstein):
        def per_example(self, output, target):
            share = torch.where(target > 0, (target > 0).sum(), (target < 0).sum())
            return -target * output.reshape(-1) * len(target) / share

    target = torch.ones(256)
    target[17] = -1
    loss, output = Coupled(), outputs(256, 1)
    assert batch_gradient(loss, output, target).norm(dim=1).max() == pytest.approx(256)
    alone = batch_gradient(loss, output[17:18], target[17:18])
    assert alone.norm() == pytest.approx(1)


@every_loss
def test_vmap_of_grad_agrees_with_autograd(loss, columns, targets):
    output, target = outputs(12, columns), targets(12, columns)
    one = torch.func.grad(lambda o, t: loss(o[None], t[None]))
    found = torch.func.vmap(one)(output, target)
    torch.testing.assert_close(found, batch_gradient(loss, output, target))


@every_loss
def test_derivatives_are_those_of_the_values(loss, columns, targets):
    output, target = outputs(4, columns).requires_grad_(), targets(4, columns)
    inputs = (output, 3 * output, output / 100)
    for point in inputs:
        value = point.detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda o: loss(o, target), value)
        assert torch.autograd.gradgradcheck(lambda o: loss(o, target), value)


@every_loss
def test_differences_of_values_obey_the_constant(loss, columns, targets):
    target = targets(300, columns)
    start, move = outputs(300, columns), outputs(600, columns)[300:]
    for size in (0.01, 1.0, 100.0):
        change = loss.per_example(start + size * move, target) - loss.per_example(start, target)
        allowed = loss.lipschitz_for((columns,)) * size * move.norm(dim=1)
        assert (change.abs() <= allowed * (1 + 1e-9)).all()


@every_loss
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30, 3e38])
def test_extreme_outputs_in_single_precision(loss, columns, targets, size):
    if isinstance(loss, L.PerExample):
        pytest.skip("the user's function decides")
    output = torch.zeros(8, columns)
    output[:3] = size * outputs(3, columns, torch.float32).sign()
    output[3:6, 0] = torch.tensor([size, -size, size])
    found = batch_gradient(loss, output, targets(8, columns))
    assert found.isfinite().all()
    assert (found.norm(dim=1) <= loss.lipschitz_for((columns,)) * (1 + 1e-6)).all()
    if size <= 1e30:
        assert loss.per_example(output, targets(8, columns)).isfinite().all()


@every_loss
def test_reductions(loss, columns, targets, monkeypatch):
    output, target = outputs(7, columns), targets(7, columns)
    values = loss.per_example(output, target)
    assert values.shape == (7,)
    for reduction, expected in [
        ("none", values),
        ("sum", values.sum()),
        ("mean", values.mean()),
    ]:
        monkeypatch.setattr(loss, "reduction", reduction)
        torch.testing.assert_close(loss(output, target), expected)


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empty_batches_cost_nothing(loss, columns, targets, reduction, monkeypatch):
    weight = torch.ones(columns, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(loss, "reduction", reduction)
    value = loss(outputs(3, columns)[:0] * weight, targets(3, columns)[:0])
    assert value.item() == 0
    (found,) = torch.autograd.grad(value, weight)
    assert found.eq(0).all()
    assert loss.per_example(outputs(3, columns)[:0], targets(3, columns)[:0]).shape == (0,)


@every_loss
def test_half_precision_outputs_are_raised_to_single(loss, columns, targets):
    if isinstance(loss, L.PerExample):
        pytest.skip("the user's function decides")
    for dtype in (torch.float16, torch.bfloat16):
        output = outputs(5, columns).to(dtype).requires_grad_()
        value = loss(output, targets(5, columns))
        assert value.dtype == torch.float32
        (found,) = torch.autograd.grad(value, output)
        assert found.dtype == dtype


@every_loss
def test_compiles_without_graph_breaks(loss, columns, targets):
    torch._dynamo.reset()
    output, target = outputs(6, columns), targets(6, columns)
    compiled = torch.compile(loss.per_example, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(output, target), loss.per_example(output, target))


@every_loss
def test_modules_hold_nothing_and_print_their_settings(loss, columns, targets):
    assert loss.state_dict() == {}
    assert list(loss.parameters()) == []
    assert "reduction='mean'" in repr(loss)
    for word in ("tau", "floor", "margin", "alpha", "delta", "output_bound"):
        if hasattr(loss, word):
            assert f"{word}={getattr(loss, word)}" in repr(loss)


def test_reduction_is_validated():
    with pytest.raises(ValueError, match="reduction"):
        L.CrossEntropy(reduction="batchmean")


def test_a_subclass_must_return_one_value_per_example():
    class Total(Loss):
        @property
        def lipschitz(self):
            return 1.0

        def per_example(self, output, target):
            return output.sum()

    assert Total().lipschitz_for((3,)) == 1.0
    with pytest.raises(ValueError, match="one value per example"):
        Total()(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(TypeError, match="abstract"):
        Loss()


@pytest.mark.parametrize(
    "module", ["_base", "_classification", "_margin", "_regression", "_per_example"]
)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"clipless.losses.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_name_is_exported():
    public = {name for name in vars(L) if name[0].isupper()}
    assert public == set(L.__all__)
