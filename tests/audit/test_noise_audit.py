"""The white-box audit: noisy gradients have as much energy as the planned noise, or more."""

import pytest
import torch

from clipless import losses
from clipless.audit import Estimate, NoiseResult, ReleasedNoise, hardest_labels
from tests.privacy.runs import SHAPES, Run, examples, mlp


def watched(*, scale=1.0, steps=6):
    run = Run(mlp(), examples(60, SHAPES[mlp]), losses.CrossEntropy(), noise_multiplier=2.0)
    plan = run.engine.session.plan
    vars(plan)["releases"] = [
        query._replace(deviation=query.deviation * scale) for query in plan.releases
    ]
    with ReleasedNoise(run.engine) as watch:
        for _ in range(steps):
            run.step()
    return watch


def test_as_much_noise_as_planned_is_left_alone():
    result = watched().result(confidence=0.9999)
    assert not result.exposed
    assert result.steps == 6
    assert all(ratio.high > 0.9 for ratio in result.ratios.values())


def test_four_fifths_of_the_noise_are_exposed():
    result = watched(scale=0.8, steps=20).result(confidence=0.99)
    assert result.exposed
    assert "TOO SMALL" in str(result)
    assert result.to_dict()["exposed"] is True


def test_nothing_watched_is_no_result():
    with pytest.raises(ValueError, match="no noisy gradient"):
        watched(steps=0).result()


def test_the_verdict_is_of_the_upper_end():
    ratio = Estimate(0.9, 0.8, 1.01)
    assert not NoiseResult(ratios={"w": ratio}, steps=1, confidence=0.95).exposed


def test_the_hardest_label_has_the_largest_gradient():
    run = Run(mlp(), examples(20, SHAPES[mlp]), losses.CrossEntropy(tau=8.0), noise_multiplier=1.0)
    x = examples(20, SHAPES[mlp])[0]
    criterion, model = losses.CrossEntropy(tau=8.0), run.model
    with torch.no_grad():
        outputs = torch.nn.Sequential(*[m for m in model]).eval()(x)  # noqa: C416
    labels = hardest_labels(x, model=model, criterion=criterion, classes=outputs.shape[1])
    leaf = outputs.requires_grad_()
    norms = []
    for label in range(outputs.shape[1]):
        loss = criterion.per_example(leaf, torch.full((len(x),), label)).sum()
        norms.append(torch.autograd.grad(loss, leaf)[0].norm(dim=1))
    largest = torch.stack(norms).max(dim=0).values
    assert torch.allclose(torch.stack(norms).gather(0, labels[None])[0], largest, rtol=0.35)
