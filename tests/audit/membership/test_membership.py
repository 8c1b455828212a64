"""Membership inference: finds what is there, does not find what is not."""

import json

import pytest
import torch
from sklearn import linear_model, metrics
from torch import nn

from clipless import losses
from clipless.audit import membership_inference
from clipless.audit._logistic import fit_logistic
from clipless.audit.membership._features import attack_features
from tests.privacy.runs import examples, mlp


def memorised(seed, count=200, width=400, classes=4):
    """A network that has learned random labels by heart, its members, and non-members."""
    torch.manual_seed(seed)
    x, y = torch.randn(2 * count, 30), torch.randint(classes, (2 * count,))
    model = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:count]), y[:count]).backward()
        optimizer.step()
    return model, (x[:count], y[:count]), (x[count:], y[count:])


LOSS = losses.CrossEntropy()
NAMES = ["loss", "confidence", "margin", "entropy", "modified entropy", "logistic regression"]


def test_a_model_that_memorised_is_found():
    result = membership_inference(*memorised(0), loss=LOSS)
    assert [each.name for each in result.attacks] == NAMES
    assert result.best_auroc.low > 0.95
    assert result.best_advantage.low > 0.6
    for each in result.attacks:
        if each.name != "entropy":
            assert each.auroc.low > 0.9
        assert each.auroc.low <= each.auroc.value <= each.auroc.high
        assert each.advantage.low <= each.advantage.value <= each.advantage.high
        assert [rate.aimed_at for rate in each.low_rates] == [0.001, 0.01, 0.1]
    assert result.attacks[0].low_rates[2].true_positive_rate.low > 0.8


def test_shadow_models_teach_the_attack():
    """The regression never sees the target's members, only models of its kind."""
    shadows = [memorised(seed) for seed in (1, 2)]
    result = membership_inference(*memorised(0), loss=LOSS, shadows=shadows)
    learned = result.attacks[-1]
    assert learned.name == "logistic regression"
    assert learned.auroc.low > 0.95
    assert learned.advantage.value > 0.8
    assert "2 shadow models" in str(result)


def test_nothing_is_found_where_nothing_is():
    """A model that saw neither kind, 40 times over: advantages average to zero, where the largest
    difference on the same examples would not."""
    model = mlp().eval()
    chosen, optimistic, covered = [], [], 0
    for seed in range(40):
        data = [examples(200, seed=2 * seed + side) for side in (0, 1)]
        result = membership_inference(model, *data, loss=LOSS, seed=seed)
        for each in result.attacks:
            chosen.append(each.advantage.value)
            optimistic.append(each.advantage_in_sample)
            covered += each.auroc.low <= 0.5 <= each.auroc.high
    assert abs(sum(chosen) / len(chosen)) < 0.02
    assert sum(optimistic) / len(optimistic) > 0.05
    assert covered >= 0.9 * len(chosen)


def test_scores_and_auroc_agree_with_another_implementation():
    model, members, others = memorised(3)
    found = [attack_features(model, *part, loss=LOSS).scores for part in (members, others)]
    label = [1] * 200 + [0] * 200
    result = membership_inference(model, members, others, loss=LOSS)
    for attack in result.attacks[:-1]:
        both = torch.cat([each[attack.name] for each in found])
        assert attack.auroc.value == pytest.approx(metrics.roc_auc_score(label, both))
        false, true, _ = metrics.roc_curve(label, both, drop_intermediate=False)
        assert attack.advantage_in_sample == pytest.approx(max(true - false))
    x, y = members
    p = model(x).double().softmax(dim=1).detach()
    mine = p.gather(1, y[:, None]).squeeze(1)
    torch.testing.assert_close(found[0]["confidence"], (mine / (1 - mine)).log(), rtol=1e-4, atol=0)
    entropy = -(p * p.log()).sum(dim=1)
    torch.testing.assert_close(found[0]["entropy"], -entropy, rtol=1e-4, atol=1e-7)
    rest = torch.where(torch.nn.functional.one_hot(y, 4).bool(), 0.0, p * (1 - p).log())
    modified = -(1 - mine) * mine.log() - rest.sum(dim=1)
    torch.testing.assert_close(found[0]["modified entropy"], -modified, rtol=1e-4, atol=1e-7)


def test_logistic_regression_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=generator)
    label = x[:, 0] + torch.randn(300, generator=generator) > 0
    attack = fit_logistic(x, label, ridge=2.0)
    scaled = (x - x.mean(dim=0)) / x.std(dim=0)
    theirs = linear_model.LogisticRegression(C=0.5, class_weight="balanced", tol=1e-8)
    theirs.fit(scaled.numpy(), label.numpy())
    torch.testing.assert_close(
        attack(x).float(),
        torch.tensor(theirs.decision_function(scaled.numpy())).float(),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="members and non-members"):
        fit_logistic(x, torch.ones(300, dtype=torch.bool))


def test_separable_features_do_not_blow_up():
    x = torch.cat([torch.zeros(20, 1), torch.ones(20, 1)])
    odds = fit_logistic(x, torch.arange(40) >= 20)(x)
    assert odds.isfinite().all()
    assert (odds[20:] > 0).all()


def test_regression_has_the_loss_only():
    model = nn.Linear(3, 2)
    data = [(torch.randn(20, 3), torch.randn(20, 2)) for _ in range(2)]
    result = membership_inference(model, *data, loss=losses.Huber(1.0))
    assert [each.name for each in result.attacks] == ["loss", "logistic regression"]


@pytest.mark.parametrize("labels", [(0, 1), (-1, 1)])
def test_one_logit(labels):
    loss = losses.BinaryCrossEntropy() if labels == (0, 1) else losses.KantorovichRubinstein()
    model = nn.Linear(3, 1)
    y = torch.tensor(labels).repeat(10)
    data = [(torch.randn(20, 3), y) for _ in range(2)]
    found = attack_features(model, *data[0], loss=loss)
    sign = 2 * y.gt(0).double() - 1
    logit = model(data[0][0]).double().squeeze(1).detach()
    torch.testing.assert_close(found.scores["margin"], sign * logit, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.scores["confidence"], sign * logit, rtol=1e-5, atol=1e-6)
    assert len(membership_inference(model, *data, loss=loss).attacks) == 6


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).train()
    first = membership_inference(model, examples(20), examples(20, seed=1), loss=LOSS)
    assert model.training
    second = membership_inference(model, examples(20), examples(20, seed=1), loss=LOSS)
    assert first == second


def test_data_and_text():
    result = membership_inference(mlp(), examples(50), examples(60, seed=1), loss=LOSS)
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["members"], data["non_members"]) == (50, 60)
    assert len(data["attacks"]) == 6
    lines = str(result).splitlines()
    assert len(lines) == 8
    assert "TPR at FPR 0.1%" in lines[0]
    assert lines[1].startswith("loss")


def test_refusals():
    with pytest.raises(ValueError, match="at least 8"):
        membership_inference(mlp(), examples(5), examples(50), loss=LOSS)
    with pytest.raises(ValueError, match="confidence"):
        membership_inference(mlp(), examples(50), examples(50), loss=LOSS, confidence=0.0)
    broken = nn.Linear(6, 3)
    nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        membership_inference(broken, examples(50), examples(50), loss=LOSS)
