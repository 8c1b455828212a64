"""What epsilon means, compared with a mechanism of which everything is known."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from scipy.stats import norm

from clipless.privacy import (
    FullBatch,
    Mechanism,
    ParameterPlan,
    Plan,
    PoissonSampling,
    Relation,
    epsilon,
)
from clipless.privacy._precision import SumRounding
from clipless.report._registry import nist_answers
from clipless.report.sections._claim import claim


def plan(*, sigma, sampling=None, relation=Relation.ZERO_OUT, delta=1e-5):
    return Plan(
        sampling=sampling or FullBatch(dataset_size=1000),
        relation=relation, noise_multiplier=sigma, noise="optimal", noise_coefficients=None,
        parameters=(ParameterPlan(name="weight", size=4, gradient_bound=1.0),),
        loss="CrossEntropy", loss_lipschitz=1.4, arithmetic_slack=1e-3, accountant="pld",
        delta=delta, target_epsilon=None, steps=1,
    )  # fmt: skip


def claimed(given, **options):
    history = [(given.mechanism, 1)]
    stated = epsilon(history, given.delta, accountant=given.accountant)
    rest = {"epsilon": stated, "history": history, "releases": 1}
    return claim(given, **{**rest, **options})


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_limits_of_guesses_hold_and_are_tight(sigma):
    """One Gaussian release: the best attack is known exactly."""
    found = claimed(plan(sigma=sigma))
    best_guess = norm.cdf(0.5 / sigma)
    assert best_guess <= found.guess_bound_exact <= best_guess + 0.005
    assert found.guess_bound_exact < found.guess_bound
    factor = math.exp(found.epsilon)
    assert found.odds_factor == factor
    assert found.guess_bound == (factor + found.delta) / (1 + factor)
    for each in found.detection:
        best_test = norm.cdf(norm.ppf(each.false_alarms) + 1 / sigma)
        assert best_test <= each.found_bound <= 1.15 * best_test


def test_words_carry_the_figures():
    found = claimed(plan(sigma=1.0, sampling=PoissonSampling(dataset_size=1000, rate=0.1)))
    assert "differentially private" in found.headline
    assert "replacing one example by an empty one" in found.headline
    assert "1e-5" in found.headline
    words = " ".join(found.meaning)
    assert "one in 100,000" in words
    assert f"{math.ceil(1000 * found.guess_bound_exact) / 10:.1f}%" in words
    assert "had it not been there" in words
    assert "1,000 examples" in found.protected[0]
    assert "whether it was there" in found.protected[0]


def test_replacement_promises_something_else():
    """Under replace-one, nothing is said about whether an example was there."""
    found = claimed(plan(sigma=1.0, relation=Relation.REPLACE_ONE))
    assert found.replaces
    assert "whether it was there" not in found.protected[0]
    assert "another in its place" in found.meaning[0]
    assert "which of two versions" in found.meaning[2]


@pytest.mark.parametrize(
    ("sigma", "word"), [(20.0, "strong one"), (1.0, "reasonable one"), (0.1, "weak one")]
)
def test_the_strength_is_put_into_words(sigma, word):
    assert word in claimed(plan(sigma=sigma)).meaning[3]


def test_a_huge_epsilon_does_not_overflow():
    found = claimed(plan(sigma=1.0), epsilon=5000.0)
    assert found.guess_bound == pytest.approx(1.0)


def test_what_is_rounded_is_rounded_up():
    from clipless.report._format import percent_upper, upper

    for value in (0.1, 1 / 3, 2.00001, 12345.678, 7e-9, 0.99951):
        assert float(upper(value).replace(",", "")) >= value
        assert float(percent_upper(value).rstrip("%")) / 100 >= value * (1 - 1e-15)
    assert upper(2.00001) != upper(2.0)


def test_nothing_is_claimed_if_nothing_can_be_trusted():
    found = claimed(plan(sigma=1.0), epsilon=None)
    assert found.standing == "void"
    assert found.guess_bound is found.odds_factor is found.epsilon is None
    assert found.detection == ()
    assert "differentially private" not in found.headline
    assert found.from_whom == ("From nobody.",)


def test_a_delta_that_is_too_large_is_in_the_fine_print():
    for delta, words in ((0.01, "with probability 100%"), (1e-3, "Choose a smaller one")):
        assert any(words in line for line in claimed(plan(sigma=1.0, delta=delta)).caveats)
    fine = claimed(plan(sigma=1.0, delta=1e-6)).caveats
    assert not any("publishing" in line for line in fine)


def test_the_history_counts_and_not_the_plan():
    given = plan(sigma=1.0)
    twice = [(given.mechanism, 2)]
    more = claimed(given, epsilon=epsilon(twice, given.delta), history=twice)
    once = claimed(given)
    assert more.guess_bound_exact > once.guess_bound_exact
    assert isinstance(given.mechanism, Mechanism)


@pytest.mark.parametrize(
    ("sampling", "sums", "answer", "words"),
    [
        (None, SumRounding(1e-7), "yes", ()),
        (PoissonSampling(dataset_size=1000, rate=0.1), SumRounding(1e-7), "in part",
         ("not proved",)),
        (None, SumRounding(1e-7, 3.0), "in part", ("float32 on this device", "real numbers")),
        (None, SumRounding(), "in part", ("not stated",)),
    ],
    ids=["all of it", "sampling", "a GPU without Triton", "an old plan"],
)  # fmt: skip
def test_whether_arithmetic_is_covered_is_answered_by_the_plan(sampling, sums, answer, words):
    found = claimed(replace(plan(sigma=1.0, sampling=sampling), sums=sums))
    assert set(found.arithmetic_caveats) <= set(found.caveats)
    record = defaultdict(lambda: defaultdict(str), post_processing=[], checks=[])
    record["arithmetic"] = {
        "holds_for": found.arithmetic, "not_covered": found.arithmetic_caveats
    }  # fmt: skip
    said = [
        each for each in nist_answers(record) if "arithmetic of the machine" in each["question"]
    ]
    assert said[0]["answer"].startswith(answer + "; ")
    assert all(each in said[0]["answer"] for each in words)
