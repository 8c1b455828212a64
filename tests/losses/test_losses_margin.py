import math

import pytest
import torch
import torch.nn.functional as F

from clipless.errors import LabelError
from clipless.losses import HingeKR, KantorovichRubinstein, MulticlassHinge

LOSSES = [
    MulticlassHinge(),
    MulticlassHinge(margin=0.01, class_reduction="sum"),
    KantorovichRubinstein(),
    HingeKR(alpha=10.0),
    HingeKR(alpha=0.3, margin=5.0),
    HingeKR(alpha=2.0, class_reduction="sum"),
]
MEANS = [MulticlassHinge(), KantorovichRubinstein(), HingeKR(alpha=3.0)]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_multiclass_is_bounded_and_tight(loss, classes, attack, class_indices):
    assert attack(loss, (classes,), class_indices) >= 0.99


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_logit_is_bounded_and_tight(loss, shape, attack, signs):
    assert attack(loss, shape, signs) >= 0.99


@pytest.mark.parametrize("kind", [MulticlassHinge, KantorovichRubinstein, HingeKR])
def test_attack_defeats_a_constant_ten_percent_too_small(kind, attack, class_indices, monkeypatch):
    loss = HingeKR(alpha=2.0) if kind is HingeKR else kind()
    honest = kind.lipschitz_for
    monkeypatch.setattr(kind, "lipschitz_for", lambda self, shape: 0.9 * honest(self, shape))
    with pytest.raises(AssertionError, match="claimed"):
        attack(loss, (4,), class_indices)


def test_constants():
    assert MulticlassHinge().lipschitz == 1
    assert MulticlassHinge(classes=4).lipschitz == 0.5
    assert MulticlassHinge(class_reduction="sum").lipschitz == math.inf
    assert MulticlassHinge(class_reduction="sum", classes=9).lipschitz == 3
    assert KantorovichRubinstein(classes=7).lipschitz == 1
    assert HingeKR(alpha=4).lipschitz == 5
    assert HingeKR(alpha=4, class_reduction="sum").lipschitz == math.inf
    assert HingeKR(alpha=4, classes=1).lipschitz == 5


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("class_reduction", ["mean", "sum"])
def test_hinge_kr_constant_is_the_norm_at_zero_and_at_most_the_sum(
    classes, alpha, class_reduction, per_example_gradients
):
    loss = HingeKR(alpha=alpha, classes=classes, class_reduction=class_reduction)
    hinge = MulticlassHinge(classes=classes, class_reduction=class_reduction).lipschitz
    target = torch.ones(1, 1) if classes == 1 else torch.tensor([0])
    output = torch.zeros(1, classes, dtype=torch.float64)
    at_zero = per_example_gradients(loss, output, target)
    assert loss.lipschitz == pytest.approx(float(at_zero.norm()), rel=1e-12)
    assert loss.lipschitz <= (alpha * hinge + 1) * (1 + 1e-12)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_definitions_written_out(classes):
    output = torch.randn(20, classes, dtype=torch.float64)
    target = torch.arange(20) % classes
    t = 2 * F.one_hot(target, classes).double() - 1
    hinge = (0.7 / 2 - t * output).clamp(min=0)
    own = output.gather(1, target[:, None])[:, 0]
    others = (output.sum(dim=1) - own) / (classes - 1)
    kr = -math.sqrt((classes - 1) / classes) * (own - others)
    total = MulticlassHinge(margin=0.7, class_reduction="sum")
    check = torch.testing.assert_close
    check(MulticlassHinge(margin=0.7).per_example(output, target), hinge.mean(dim=1))
    check(total.per_example(output, target), hinge.sum(dim=1))
    check(KantorovichRubinstein().per_example(output, target), kr)
    check(HingeKR(alpha=3, margin=0.7)(output, target), (3 * hinge.mean(dim=1) + kr).mean())


def test_one_logit_definitions_and_label_layouts():
    output, t = torch.randn(20), torch.tensor([-1, 1]).repeat(10)
    expected_hinge = F.margin_ranking_loss(output, torch.zeros(20), t, margin=0.5)
    for scores in (output, output[:, None]):
        for labels in (t, t[:, None], t.float(), t.to(torch.int8)):
            torch.testing.assert_close(MulticlassHinge()(scores, labels), expected_hinge)
            torch.testing.assert_close(
                KantorovichRubinstein()(scores, labels), -(t * output).mean()
            )
            torch.testing.assert_close(
                HingeKR(alpha=2.0)(scores, labels), 2 * expected_hinge - (t * output).mean()
            )


@pytest.mark.parametrize("loss", MEANS, ids=repr)
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (torch.tensor([0, 1, 1]), "2 \\* target - 1"),
        (torch.tensor([1.0, 0.9, -1.0]), "some are neither"),
        (torch.tensor([1.0, math.nan, -1.0]), "some are neither"),
        (torch.tensor([True, False, True]), "booleans"),
        (torch.tensor([1, -1]), "one label per example"),
        (torch.ones(3, 3), "one label per example"),
        (torch.ones(3) + 0j, "complex"),
    ],
)
def test_wrong_binary_labels_are_refused(loss, shape, target, advice):
    with pytest.raises(LabelError, match=advice):
        loss(torch.zeros(shape), target)


@pytest.mark.parametrize("loss", MEANS, ids=repr)
@pytest.mark.parametrize(
    "target",
    [
        torch.tensor([-1, 1, 1]),
        torch.tensor([0, 1, 4]),
        torch.tensor([0, 1, -100]),
        torch.tensor([1.0, -1.0, 1.0]),
        2 * torch.eye(3, 4) - 1,
        torch.eye(3, 4, dtype=torch.long),
    ],
)
def test_wrong_class_labels_are_refused(loss, target):
    with pytest.raises(LabelError):
        loss(torch.zeros(3, 4), target)


@pytest.mark.parametrize("loss", MEANS, ids=repr)
def test_labels_that_cannot_be_read_keep_the_bound(loss, per_example_gradients):
    wild = torch.tensor([0.0, 30.0, -30.0, math.nan, math.inf, -math.inf])
    found = per_example_gradients(loss, torch.zeros(6), wild).abs()
    torch.testing.assert_close(found, loss.lipschitz * torch.tensor([0.0, 1, 1, 0, 1, 1]))
    unknown = per_example_gradients(loss, torch.randn(3, 5), torch.tensor([-1, 5, -100]))
    assert unknown.abs().max() == 0


@pytest.mark.parametrize("kind", [MulticlassHinge, KantorovichRubinstein, HingeKR])
def test_the_promised_number_of_logits_is_enforced(kind):
    loss = kind(classes=4, **({"alpha": 1.0} if kind is HingeKR else {}))
    with pytest.raises(ValueError, match="classes=4"):
        loss(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="classes=4"):
        loss(torch.zeros(2), torch.tensor([-1, 1]))
    with pytest.raises(ValueError, match="classes=4"):
        loss.lipschitz_for((5,))
    with pytest.raises(ValueError, match="shape"):
        loss(torch.zeros(2, 2, 2), torch.tensor([0, 1]))


def test_settings_are_validated():
    for value in (0, -1.0, math.inf, math.nan, "1"):
        with pytest.raises(ValueError, match="margin"):
            MulticlassHinge(margin=value)
        with pytest.raises(ValueError, match="alpha"):
            HingeKR(alpha=value)
        with pytest.raises(ValueError, match="margin"):
            HingeKR(alpha=1.0, margin=value)
    for value in (0, -1, 2.0, True, "2"):
        with pytest.raises(ValueError, match="classes"):
            KantorovichRubinstein(classes=value)
    with pytest.raises(ValueError, match="class_reduction"):
        MulticlassHinge(class_reduction="max")
    with pytest.raises(ValueError, match="class_reduction"):
        HingeKR(alpha=1.0, class_reduction="none")
