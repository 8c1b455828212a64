"""The plan: one object from which sampling, noise and accounting follow."""

import json

import pytest
import torch

from clipless import project
from clipless.kernels import joint_multiplier
from clipless.privacy import FixedSizeSampling, Plan, PoissonSampling, Relation, epsilon
from tests.privacy.runs import Run, examples, mlp


def plan_of(**options):
    return Run(**options).engine.plan


@pytest.mark.parametrize("noise", ["global", "per_layer", "optimal"])
def test_noise_and_accounting_agree(noise):
    plan = plan_of(noise=noise, noise_multiplier=1.7)
    joint = joint_multiplier(
        list(plan.sensitivities.values()), list(plan.noise_deviations.values())
    )
    assert joint == pytest.approx(plan.mechanism.noise_multiplier)
    assert plan.mechanism.noise_multiplier == 1.7


def test_sensitivity_is_bound_over_public_batch_size_with_slack():
    plan = plan_of(batch_size=25)
    assert plan.expected_batch_size == 25
    for parameter in plan.parameters:
        expected = parameter.gradient_bound / 25 * (1 + plan.arithmetic_slack)
        assert plan.sensitivities[parameter.name] == pytest.approx(expected, rel=1e-12)


def test_all_strategies_cost_the_same_epsilon():
    costs = {plan_of(noise=n).epsilon(steps=50) for n in ("global", "per_layer", "optimal")}
    assert len(costs) == 1


def test_epsilon_reads_the_mechanism_and_nothing_else():
    plan = plan_of(noise_multiplier=2.0)
    assert plan.epsilon(steps=70) == epsilon([(plan.mechanism, 70)], plan.delta)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pad": True},
        {"sampling": "fixed_size"},
        {"sampling": "full_batch"},
        {"noise": "per_layer"},
        {"target_epsilon": 3.0, "epochs": 2},
    ],
    ids=str,
)
def test_round_trip_through_json(options, tmp_path):
    plan = plan_of(**options)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_unknown_fields_are_refused():
    data = plan_of().to_dict()
    with pytest.raises(ValueError, match="fields"):
        Plan.from_dict({**data, "surprise": 1})


def test_plans_can_be_compared():
    a, b = plan_of(noise_multiplier=1.0), plan_of(noise_multiplier=2.0)
    assert a != b
    assert a.differences(b) == {"noise_multiplier": (1.0, 2.0)}
    assert plan_of() == plan_of()


def test_plan_is_frozen():
    with pytest.raises(AttributeError):
        plan_of().noise_multiplier = 0.0


def test_relations_follow_the_sampling():
    assert plan_of().relation is Relation.ZERO_OUT
    assert plan_of(sampling="fixed_size").relation is Relation.REPLACE_ONE
    assert plan_of(relation="replace_one").relation is Relation.REPLACE_ONE
    assert isinstance(plan_of(sampling="fixed_size").sampling, FixedSizeSampling)


def test_padding_is_part_of_the_mechanism():
    plan = plan_of(data=examples(1000), batch_size=50, pad=True)
    assert isinstance(plan.sampling, PoissonSampling)
    assert plan.sampling.max_batch_size is not None


def test_delta_follows_the_rule_and_is_shown():
    assert plan_of().delta == 1e-4
    assert "delta 0.0001" in str(plan_of())


def test_printing():
    text = str(plan_of(target_epsilon=3.0, epochs=4))
    for words in ("Poisson, 20 of 100", "epsilon 3", "CrossEntropy", "planned steps", "20"):
        assert words in text


def test_half_precision_parameters_are_refused():
    model = mlp().to(torch.bfloat16)
    project(model)
    with pytest.raises(ValueError, match="float32"):
        Run(model)
