import math

import pytest
import torch
import torch.nn.functional as F

from clipless.errors import LabelError
from clipless.losses import BinaryCrossEntropy, CosineSimilarity, CrossEntropy

CLASS_CASES = [
    (loss, (classes,))
    for loss in (
        CrossEntropy(),
        CrossEntropy(tau=18.0),
        CrossEntropy(tau=0.05),
        CosineSimilarity(floor=0.01),
        CosineSimilarity(floor=3.0),
    )
    for classes in (2, 3, 10)
]
BINARY_CASES = [
    (BinaryCrossEntropy(tau=tau), shape)
    for tau in (0.05, 1.0, 20.0)
    for shape in ((), (1,), (2,), (7,), (2, 3))
]


def probabilities(count, shape, generator):
    """0 and 1, mixed with a few probabilities in between."""
    hard = torch.randint(0, 2, (count, *shape), generator=generator).double()
    soft = torch.rand(count, *shape, generator=generator, dtype=torch.float64)
    return torch.where((torch.arange(count) % 5 == 0).reshape(-1, *[1 for _ in shape]), soft, hard)


@pytest.mark.parametrize(("loss", "shape"), CLASS_CASES, ids=repr)
def test_class_losses_are_bounded_and_tight(loss, shape, attack, class_indices):
    assert attack(loss, shape, class_indices) >= 0.99


@pytest.mark.parametrize(("loss", "shape"), BINARY_CASES, ids=repr)
def test_binary_cross_entropy_is_bounded_and_tight(loss, shape, attack):
    assert attack(loss, shape, probabilities) >= 0.99


def test_constants():
    assert CrossEntropy(tau=5).lipschitz_for((10,)) == math.sqrt(2)
    assert BinaryCrossEntropy().lipschitz == 1
    assert BinaryCrossEntropy().lipschitz_for(()) == 1
    assert BinaryCrossEntropy().lipschitz_for((2, 8)) == 0.25
    assert CosineSimilarity(floor=0.25).lipschitz == 4


@pytest.mark.parametrize("kind", [CrossEntropy, BinaryCrossEntropy, CosineSimilarity])
def test_attack_defeats_a_constant_ten_percent_too_small(kind, attack, class_indices, monkeypatch):
    loss = kind(floor=0.5) if kind is CosineSimilarity else kind()
    targets = probabilities if kind is BinaryCrossEntropy else class_indices
    honest = kind.lipschitz_for
    monkeypatch.setattr(kind, "lipschitz_for", lambda self, shape: 0.9 * honest(self, shape))
    with pytest.raises(AssertionError, match="claimed"):
        attack(loss, (4,), targets)


def test_attack_notices_a_forgotten_division_by_tau(attack, class_indices):
    class Steep(CrossEntropy):
        def per_example(self, output, target):
            return self.tau * super().per_example(output, target)

    with pytest.raises(AssertionError, match="claimed"):
        attack(Steep(tau=1.2), (4,), class_indices)


@pytest.mark.parametrize("tau", [0.3, 1.0, 18.0])
def test_cross_entropy_agrees_with_torch(tau):
    output, target = torch.randn(50, 7, dtype=torch.float64) * 3, torch.arange(50) % 7
    expected = F.cross_entropy(tau * output, target, reduction="none") / tau
    torch.testing.assert_close(CrossEntropy(tau=tau).per_example(output, target), expected)
    torch.testing.assert_close(CrossEntropy(tau=tau)(output, target), expected.mean())
    for dtype in (torch.uint8, torch.int32):
        torch.testing.assert_close(CrossEntropy(tau=tau)(output, target.to(dtype)), expected.mean())


@pytest.mark.parametrize("tau", [0.3, 1.0, 20.0])
def test_binary_cross_entropy_agrees_with_torch(tau):
    output = torch.randn(50, 3, dtype=torch.float64) * 3
    target = torch.rand(50, 3, dtype=torch.float64).round(decimals=1)
    expected = F.binary_cross_entropy_with_logits(tau * output, target, reduction="none") / tau
    loss = BinaryCrossEntropy(tau=tau)
    torch.testing.assert_close(loss.per_example(output, target), expected.mean(dim=1))
    hard = target > 0.5
    one = F.binary_cross_entropy_with_logits(tau * output[:, 0], hard[:, 0].double()) / tau
    for labels in (hard[:, 0], hard[:, :1], hard[:, 0].long(), hard[:, 0].float()):
        torch.testing.assert_close(loss(output[:, 0], labels), one)
        torch.testing.assert_close(loss(output[:, :1], labels), one)


def test_binary_cross_entropy_is_precise_in_both_tails():
    output = torch.linspace(-60, 60, 97, dtype=torch.float64)
    for label in (0.0, 1.0):
        target = torch.full_like(output, label)
        expected = torch.logaddexp(torch.zeros_like(output), (1 - 2 * label) * output)
        found = BinaryCrossEntropy().per_example(output, target)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)


def test_cosine_similarity_agrees_with_torch():
    output, target = torch.randn(50, 7, dtype=torch.float64), torch.arange(50) % 7
    expected = -F.cosine_similarity(output, F.one_hot(target, 7).double())
    loss = CosineSimilarity(floor=1e-3)
    torch.testing.assert_close(loss.per_example(output, target), expected)
    torch.testing.assert_close(loss.per_example(output * 1e30, target), expected)
    short = output * 1e-6
    torch.testing.assert_close(
        loss.per_example(short, target), -short.gather(1, target[:, None])[:, 0] / 1e-3
    )


@pytest.mark.parametrize("loss", [CrossEntropy(), CosineSimilarity(floor=1.0)], ids=repr)
@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (torch.eye(3), "argmax"),
        (torch.eye(3, dtype=torch.long), "argmax"),
        (torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 0]]), "several labels"),
        (torch.full((3, 3), 1 / 3), "smoothed"),
        (torch.tensor([0.0, 1.0, 2.0]), "long"),
        (torch.tensor([True, False, True]), "long"),
        (torch.tensor([[0], [1], [2]]), "squeeze"),
        (torch.tensor([0, 1]), "one class index per example"),
        (torch.tensor(1), "one class index per example"),
        (torch.tensor([0, 1, 3]), "from 0 to 2"),
        (torch.tensor([0, -1, 1]), "Remove unlabelled"),
        (torch.tensor([0, -100, 1]), "Remove unlabelled"),
        (torch.tensor([0, 1, 2]) + 0j, "integer class indices"),
    ],
)
def test_wrong_class_labels_are_refused(loss, target, advice):
    with pytest.raises(LabelError, match=advice):
        loss(torch.zeros(3, 3), target)


@pytest.mark.parametrize(
    ("output_shape", "target", "advice"),
    [
        ((3,), torch.tensor([-1, 1, 1]), "target \\+ 1"),
        ((3, 1), torch.tensor([-1.0, 1.0, 1.0]), "target \\+ 1"),
        ((3,), torch.tensor([0, 1, 2]), "between 0 and 1"),
        ((3,), torch.tensor([0.0, math.nan, 1.0]), "between 0 and 1"),
        ((3, 2), torch.tensor([0, 1, 1]), "CrossEntropy"),
        ((3, 2), torch.zeros(3, 1), "one label per output"),
        ((3,), torch.zeros(3, 3), "one label per example"),
        ((3, 1), torch.zeros(1), "one label per example"),
        ((3,), torch.zeros(3) + 0j, "real"),
    ],
)
def test_wrong_binary_labels_are_refused(output_shape, target, advice):
    with pytest.raises(LabelError, match=advice):
        BinaryCrossEntropy()(torch.zeros(output_shape), target)


@pytest.mark.parametrize("loss", [CrossEntropy(), CosineSimilarity(floor=1.0)], ids=repr)
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4, 5), ()])
def test_outputs_without_class_axis_are_refused(loss, shape):
    with pytest.raises(ValueError, match="batch"):
        loss(torch.zeros(shape), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="K >= 2"):
        loss.lipschitz_for(shape[1:])


@pytest.mark.parametrize("loss", [CrossEntropy(tau=9.0), CosineSimilarity(floor=0.1)], ids=repr)
def test_class_labels_that_cannot_be_read_contribute_nothing(loss, per_example_gradients):
    labels = torch.tensor([5, -1, -100, 1])
    found = per_example_gradients(loss, torch.randn(4, 5), labels)
    assert found[:3].abs().max() == 0
    assert found[3].norm() > 0


def test_binary_labels_that_cannot_be_read_are_clamped(per_example_gradients):
    labels = torch.tensor([-1.0, 17.0, math.nan, math.inf, -math.inf])
    output = torch.zeros(5)
    found = per_example_gradients(BinaryCrossEntropy(), output, labels)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.5, -0.5, 0.5]))


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1", None])
def test_settings_are_validated(value):
    for build in (
        lambda: CrossEntropy(tau=value),
        lambda: BinaryCrossEntropy(tau=value),
        lambda: CosineSimilarity(floor=value),
    ):
        with pytest.raises(ValueError, match=r"tau|floor"):
            build()
