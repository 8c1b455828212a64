"""Training on images: one budget for all, a model that is whole, certificates that hold."""

import dataclasses

import pytest
import torch

import clipless
from clipless import losses
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.images import ImageRule, build_network, train_images
from clipless.privacy import FullBatch, Ledger, Mechanism, Relation
from clipless.robustness import AttackOptions, attack_certificates, certified_accuracy
from clipless.statistics import PrivateRows
from tests.images.small import striped


def quick(**changes):
    rule = ImageRule.choose(examples=800, epsilon=8.0, certified=changes.pop("certified", False))
    return dataclasses.replace(rule, **{"steps": 40, "learning_rate": 0.02} | changes)


@pytest.fixture(scope="module")
def trained():
    x, y = striped(800, seed=0)
    ledger = Ledger.in_memory(dataset_size=800, relation=Relation.ZERO_OUT)
    return train_images(x, y, classes=2, epsilon=8.0, rule=quick(), ledger=ledger), ledger


def test_statistics_and_training_share_one_budget(trained):
    model, ledger = trained
    labels = [entry.label for entry in ledger.entries() if entry.label]
    assert ledger.releases == 44
    queries = {"histograms", "means", "deviations", "covariance"}
    assert {f"channel {query}" for query in queries} <= set(labels)
    spent = clipless.privacy.epsilon(ledger.history(), model.privacy.delta)
    assert 7.5 < spent <= 8.0
    assert model.privacy.epsilon == pytest.approx(spent)


def test_the_model_takes_pixels_and_is_right(trained):
    x, y = striped(300, seed=1)
    assert trained[0].accuracy(x, y) > 0.9
    model = trained[0].model
    assert not model.training
    torch.testing.assert_close(clipless.to_torch(model)(x[:5]), model(x[:5]))


def test_the_planned_bound_is_that_of_the_whole_model(trained):
    """The head was trained on features; the bound holds for it behind the front end as well."""
    result = trained[0]
    report = clipless.sensitivity(
        result.model, loss=losses.CrossEntropy(tau=result.rule.temperature), input_shape=(1, 8, 8)
    )
    planned = {each.name: each.gradient_bound for each in result.privacy.plan.parameters}
    assert report.gradient_bounds == pytest.approx(planned)


def test_gradients_stay_below_the_bound(trained):
    """Adversarial images through the whole model: the head's gradient never exceeds the bound."""
    result = trained[0]
    criterion = losses.CrossEntropy(tau=result.rule.temperature)
    bound = result.privacy.plan.parameters[0].gradient_bound
    images = torch.stack([
        torch.zeros(1, 8, 8), torch.ones(1, 8, 8), 1e6 * torch.rand(1, 8, 8),
        torch.full((1, 8, 8), torch.inf), -torch.rand(1, 8, 8),
    ])  # fmt: skip
    largest = 0.0
    for image in images:
        for label in (0, 1):
            model = result.model
            model.zero_grad()
            criterion(model(image[None]), torch.tensor([label])).backward()
            largest = max(largest, model.get_submodule("head").weight.grad.norm().item())
    assert 0.5 * bound < largest <= bound * 1.001


def test_certificates_hold_in_pixels():
    x, y = striped(800, seed=0)
    result = train_images(x, y, classes=2, epsilon=20.0, rule=quick(certified=True, mirror=True))
    test, labels = striped(100, seed=1)
    found = certified_accuracy(result.model, test, labels, radii=(0.0, 2 / 255))
    report = clipless.sensitivity(result.model, loss=losses.CrossEntropy(), input_shape=(1, 8, 8))
    assert report.lipschitz <= 1.00001
    assert found.accuracies[0] > 0.9
    assert found.accuracies[1] > 0.5
    assert (
        attack_certificates(
            result.model, test[:20], attack=AttackOptions(steps=10, restarts=2, ladder=())
        ).broken
        == ()
    )


def test_no_two_runs_have_the_same_noise():
    x, y = striped(200, seed=0)
    rule = dataclasses.replace(quick(), steps=5)
    one, two = (train_images(x, y, classes=2, epsilon=8.0, rule=rule).model for _ in range(2))
    means = [each.get_submodule("standardize").state_dict() for each in (one, two)]
    assert all((means[0][name] != means[1][name]).any() for name in means[0])
    assert not torch.equal(one.get_submodule("head").weight, two.get_submodule("head").weight)


def test_images_of_unknown_labels_contribute_nothing(monkeypatch):
    x, y = striped(200, seed=0)
    y[3], y[4] = 1000, -1
    handed = []
    hand_over = PrivateRows.hand_over
    monkeypatch.setattr(
        PrivateRows, "hand_over", lambda rows: handed.append(hand_over(rows)) or handed[0]
    )
    rule = dataclasses.replace(quick(), steps=2)
    train_images(x, y, classes=2, epsilon=8.0, rule=rule)
    features, labels = handed[0].tensors
    assert (features[3:5] == 0).all()
    assert (labels[3:5] == 0).all()
    assert torch.equal(labels[5:], y[5:])


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="as many labels"):
        train_images(torch.rand(10, 1, 8, 8), torch.zeros(9).long(), classes=2, epsilon=1.0)


def test_rule_is_public_and_certified_rule_has_a_constant():
    rule = ImageRule.choose(examples=50_000, epsilon=1.0, mirror=True, certified=True)
    network = build_network(rule, input_shape=(3, 8, 8), classes=10)
    report = clipless.sensitivity(network, loss=losses.CrossEntropy(), input_shape=(3, 8, 8))
    assert report.lipschitz <= 1.00001


def test_a_budget_without_room_for_training_is_refused_before_the_first_query():
    """A shared ledger that is nearly spent: nothing is asked of the images, nothing is spent."""
    x, y = striped(800, seed=0)
    ledger = Ledger.in_memory(dataset_size=800, relation=Relation.ZERO_OUT)
    sampling = FullBatch(dataset_size=800)
    ledger.record(Mechanism(noise_multiplier=4.0, sampling=sampling), label="an earlier model")
    spent = clipless.privacy.epsilon(ledger.history(), 1e-4)
    for epsilon in (0.5 * spent, 1.0001 * spent):
        with pytest.raises(BudgetExhaustedError, match=r"spent"):
            train_images(x, y, classes=2, epsilon=epsilon, rule=quick(), ledger=ledger)
        assert ledger.releases == 1
    with pytest.raises(PrivacyError, match="1/N"):
        train_images(x, y, classes=2, epsilon=8.0, delta=1 / 800, rule=quick(), ledger=ledger)
    assert ledger.releases == 1
    train_images(x, y, classes=2, epsilon=spent + 1, rule=quick(), ledger=ledger)
    assert clipless.privacy.epsilon(ledger.history(), 1e-4) <= spent + 1
