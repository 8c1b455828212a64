"""What is chosen after looking: the usual accountants do not cover it, a declared filter does."""

import json
import math

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

from clipless import PrivacyEngine
from clipless.accounting import SAMPLER_EPSILON
from clipless.errors import BudgetExhaustedError, LedgerError
from clipless.privacy import (
    Budget,
    FullBatch,
    Ledger,
    Mechanism,
    PoissonSampling,
    Relation,
    RenyiFilter,
    delta,
    epsilon,
    noise_multiplier_for,
)
from clipless.report import build
from clipless.runs import RunConfig, open_run, train_run
from tests.privacy.misuse_helpers import refused
from tests.privacy.runs import Run

EPSILON, DELTA, N = 3.0, 1e-5, 60_000
KIND = {"dataset_size": N, "relation": Relation.ZERO_OUT}


def full(sigma):
    return Mechanism(noise_multiplier=sigma, sampling=FullBatch(dataset_size=N))


def poisson(sigma, rate=0.01, size=N):
    return Mechanism(noise_multiplier=sigma, sampling=PoissonSampling(dataset_size=size, rate=rate))


def profile(mechanism, eps):
    """The exact hockey-stick divergence of one release with the example from one without."""
    sigma, growth = mechanism.noise_multiplier, np.exp(np.clip(eps, -700, 700))
    rate = getattr(mechanism.sampling, "rate", 1.0)
    ratio = growth - 1 + rate
    threshold = sigma**2 * np.log(np.where(ratio > 0, ratio, 1) / rate) + 0.5
    present = (1 - rate) * stats.norm.sf(threshold / sigma)
    present = present + rate * stats.norm.sf((threshold - 1) / sigma)
    return np.where(ratio > 0, present - growth * stats.norm.sf(threshold / sigma), 1 - growth)


def delta_of_the_best_choice(first, branches):
    """The exact delta(3) when the result of a Gaussian release chooses what comes next."""
    sigma = first.noise_multiplier
    x = np.linspace(1 - 12 * sigma, 1 + 12 * sigma, 100_001)
    left = EPSILON - (2 * x - 1) / (2 * sigma**2)
    best = np.max([profile(each, left) for each in branches], axis=0)
    return float(np.trapezoid(stats.norm.pdf(x, 1, sigma) * best, x))


def continued(first, rates, accountant):
    """Continuations of `first`, each calibrated to the whole budget."""
    found = []
    for rate in rates:
        sampling = PoissonSampling(dataset_size=N, rate=rate) if rate < 1 else full(1.0).sampling
        sigma = noise_multiplier_for(
            target_epsilon=EPSILON, target_delta=DELTA, steps=1, sampling=sampling,
            history=[(first, 1)], accountant=accountant,
        )  # fmt: skip
        found.append(Mechanism(noise_multiplier=sigma, sampling=sampling))
    return found


# --- The counterexample -------------------------------------------------------------------------


def test_two_branches_that_each_keep_the_budget_exceed_it_together():
    """Each costs (3, 1e-5) by the usual accountant; chosen after looking, delta is 1.77e-5."""
    first = full(2.0)
    branches = continued(first, (1.0, 0.01), "pld")
    for branch in branches:
        assert epsilon([(first, 1), (branch, 1)], DELTA) <= EPSILON
        assert delta_of_the_best_choice(first, [branch]) <= DELTA
    assert delta_of_the_best_choice(first, branches) == pytest.approx(1.77e-5, rel=0.01)


@pytest.mark.parametrize("sigma", [1.6, 2.0, 4.0])
def test_under_a_filter_no_choice_exceeds_the_budget(sigma):
    first = full(sigma)
    declared = RenyiFilter.planned(epsilon=EPSILON, delta=DELTA, mechanism=first)
    branches = continued(first, (1.0, 0.5, 0.1, 0.01, 1e-3, 1e-4), declared.meter)
    for branch in branches:
        assert declared.releases_left([(first, 1)], branch) == 1
    found = delta_of_the_best_choice(first, branches)
    assert max(delta_of_the_best_choice(first, [each]) for each in branches) < found <= DELTA


def test_the_engine_refuses_the_choice_without_a_filter():
    run = Run().steps(1)
    before = run.engine.plan
    with refused("after a release", "accountant='filter'"):
        run.engine.set_noise_multiplier(0.6)
    assert run.engine.plan is before
    run.engine.set_noise_multiplier(before.noise_multiplier)  # nothing is chosen
    run.steps(1)
    fresh = Run()
    fresh.engine.set_noise_multiplier(2.0)  # nothing has been released
    assert fresh.steps(1).engine.ledger.history()[0][0].noise_multiplier == 2.0


def test_the_ledger_of_another_run_was_looked_at_too():
    engine = PrivacyEngine()
    Run(engine=engine).steps(1)
    second = Run(engine=engine)
    with refused("after a release"):
        second.engine.set_noise_multiplier(0.6)


# --- The engine under a filter ------------------------------------------------------------------


def filtered(**options):
    engine = PrivacyEngine(accountant="filter")
    return Run(engine=engine, **{"target_epsilon": EPSILON, "target_delta": 1e-4, **options})


def test_a_declared_filter_allows_the_choice_and_stops_at_the_budget():
    run = filtered(steps=20).steps(5)
    assert run.engine.ledger.filter.epsilon == EPSILON
    run.engine.set_noise_multiplier(0.7 * run.engine.plan.noise_multiplier)
    with refused("would exceed", error=BudgetExhaustedError):
        run.steps(20)
    history = run.engine.ledger.history()
    assert len(history) == 2
    assert 5 < sum(count for _, count in history) < 20
    declared = run.engine.ledger.filter
    assert declared.fits(declared.spent(history))
    assert run.engine.get_epsilon() == EPSILON


@pytest.mark.parametrize("pad", [False, True])
def test_all_planned_steps_fit_and_none_more(pad):
    run = filtered(steps=20, pad=pad).steps(20)
    assert run.engine.get_epsilon() == EPSILON
    with refused("would exceed", error=BudgetExhaustedError):
        run.step()
    assert run.engine.ledger.releases == 20


def test_a_filter_states_the_whole_budget_from_the_first_release_on():
    run = filtered(steps=50)
    assert run.engine.get_epsilon() == 0.0
    run.step()
    assert run.engine.get_epsilon() == EPSILON == run.engine.get_epsilon(further_steps=10)
    assert run.engine.get_epsilon(1e-6) > EPSILON > run.engine.get_epsilon(1e-3)
    report = run.engine.report()
    assert "filter of order" in str(report)
    assert "may follow from results" in str(report).replace("\n", " ")
    assert not any("fixed beforehand" in caveat for caveat in report.caveats)
    usual = Run().steps(1).engine.report()
    assert "fixed beforehand" in str(usual)
    assert any("accountant='filter'" in caveat for caveat in usual.caveats)


def test_a_filter_costs_little_more_than_renyi_accounting():
    ours = filtered(steps=300, batch_size=5).engine.plan.noise_multiplier
    options = {"target_epsilon": EPSILON, "target_delta": 1e-4, "steps": 300, "batch_size": 5}
    for accountant, factor in (("rdp", 1.001), ("pld", 1.2)):
        other = Run(engine=PrivacyEngine(accountant=accountant), **options).engine.plan
        assert other.noise_multiplier <= 1.0001 * ours <= factor * 1.0001 * other.noise_multiplier


def test_later_runs_share_the_filter(tmp_path):
    run = filtered(steps=20).steps(10)
    engine = run.engine
    other = Run(engine=engine, batch_size=50, target_epsilon=2.9, steps=5).steps(5)
    assert other.engine.plan.accountant == str(engine.ledger.filter)
    assert engine.ledger.filter.fits(engine.ledger.filter.spent(engine.ledger.history()))
    assert engine.get_epsilon() == EPSILON
    for wanted in ({"target_epsilon": 3.1}, {"target_epsilon": 2.0, "target_delta": 1e-5}):
        with refused("another budget"):
            Run(engine=engine, steps=5, **wanted)


def test_a_filter_is_declared_before_the_first_release(tmp_path):
    Run(engine=PrivacyEngine(ledger=tmp_path / "ledger")).steps(1).engine.close()
    with refused("without a filter", "before the first release"):
        Run(engine=PrivacyEngine(ledger=tmp_path / "ledger", accountant="filter"),
            target_epsilon=3.0, steps=5)  # fmt: skip
    with refused("target_epsilon"):
        Run(engine=PrivacyEngine(accountant="filter"), noise_multiplier=1.0)


def test_a_run_under_a_filter_is_resumed_with_the_noise_it_had(tmp_path):
    engine = PrivacyEngine(ledger=tmp_path / "ledger", accountant="filter")
    run = Run(engine=engine, target_epsilon=EPSILON, steps=20).steps(2)
    run.engine.set_noise_multiplier(9.0)
    run.steps(1)
    state, model = run.engine.state_dict(), run.model.state_dict()
    run.engine.close()
    engine = PrivacyEngine(ledger=tmp_path / "ledger")  # the ledger knows that it is filtered
    again = Run(engine=engine, target_epsilon=EPSILON, steps=20, resume_from=state)
    again.model.load_state_dict(model)
    assert again.engine.plan.noise_multiplier == 9.0
    assert again.steps(2).engine.get_epsilon() == EPSILON


# --- The ledger keeps the filter ----------------------------------------------------------------


def declared_for(mechanism, epsilon=EPSILON):
    return RenyiFilter.planned(epsilon=epsilon, delta=DELTA, mechanism=mechanism)


@pytest.mark.parametrize("way", ["spend", "record", "reserve"])
def test_the_ledger_refuses_what_exceeds_its_filter_and_writes_nothing(way, tmp_path):
    step = poisson(1.0, rate=0.03)
    declared = declared_for(step)
    most = declared.releases_left((), step)
    assert 10 < most < 1000
    with Ledger(tmp_path / "ledger", **KIND, filter=declared) as ledger:
        for _ in range(most):
            ledger.spend(step)
        assert dict(ledger.history()) == {step: most}
        head = ledger.head
        options = {"spend": {}, "record": {"label": "x"}, "reserve": {"count": 1}}[way]
        with pytest.raises(BudgetExhaustedError, match="would exceed the declared filter"):
            getattr(ledger, way)(step, **options)
        with pytest.raises(BudgetExhaustedError):
            ledger.record(full(0.0), label="no noise")
        assert ledger.head == head
        assert ledger.releases == most
        history = ledger.history()
    with Ledger(tmp_path / "ledger") as again:  # the file knows
        assert again.filter == declared
        assert again.history() == history
        with pytest.raises(BudgetExhaustedError):
            again.spend(step)
    with pytest.raises(LedgerError, match="declared before the first release"):
        Ledger(tmp_path / "ledger", filter=declared_for(step, epsilon=4.0))


def test_what_is_reserved_and_not_used_is_room():
    step = poisson(1.0, rate=0.03)
    declared = declared_for(step)
    most = declared.releases_left((), step)
    with Ledger.in_memory(**KIND, filter=declared) as ledger:
        ledger.reserve(step, count=most)
        ledger.record(step, label="instead")
        for _ in range(most - 1):
            ledger.spend(step)
        with pytest.raises(BudgetExhaustedError):
            ledger.spend(step)


def test_a_filter_is_part_of_every_copy_of_a_ledger():
    step = poisson(1.0)
    with (
        Ledger.in_memory(**KIND, filter=declared_for(step)) as ledger,
        Ledger.in_memory(**KIND) as plain,
    ):
        ledger.spend(step)
        text = ledger.snapshot()
        assert Ledger(None, snapshot=text).filter == ledger.filter
        with pytest.raises(LedgerError, match="no filter"):
            plain.absorb(text)
        header = json.loads(text.splitlines()[0])
        assert header["version"] == 2  # which earlier versions refuse
        assert header["filter"] == ledger.filter.to_dict()
        assert json.loads(plain.snapshot().splitlines()[0])["version"] == 1


def test_a_history_beyond_its_filter_has_no_epsilon():
    step = poisson(1.0, rate=0.03)
    declared = declared_for(step)
    most = declared.releases_left((), step)
    assert epsilon([(step, most)], DELTA, accountant=str(declared)) == EPSILON
    assert epsilon([(step, most + 1)], DELTA, accountant=str(declared)) == math.inf
    assert delta([(step, most + 1)], EPSILON, accountant=str(declared)) == 1.0
    assert delta([(step, most)], EPSILON, accountant=str(declared)) == pytest.approx(DELTA)


# --- The arithmetic -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1.5, 3.3, 8.0, 64.0])
@pytest.mark.parametrize("target", [1e-3, 1e-6, 1e-9])
def test_one_order_against_the_library(order, target):
    history = [(poisson(0.9, rate=0.02), 300), (full(20.0), 3)]
    total = 0.0
    for mechanism, count in history:
        q, sigma = getattr(mechanism.sampling, "rate", 1.0), mechanism.noise_multiplier
        one = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(q, sigma, [order])
        total += count * float(one[0])
    expected = rdp_privacy_accountant.compute_epsilon([order], [total], target)[0]
    found = epsilon(history, target, accountant=f"rdp@{order}")
    assert found == pytest.approx(expected + SAMPLER_EPSILON, rel=1e-6)
    assert epsilon(history, target, accountant="rdp") <= found * (1 + 1e-9)
    back = delta(history, found, accountant=f"rdp@{order}")
    assert back == pytest.approx(target, rel=1e-6)


def test_the_order_is_the_best_one_for_the_planned_mechanism():
    step = poisson(1.0)
    declared = declared_for(step)
    most = declared.releases_left((), step)
    for order in (1.5, 2.0, 4.0, 6.0, 10.0, 20.0, 63.0):
        try:
            other = RenyiFilter(epsilon=EPSILON, delta=DELTA, order=order)
        except ValueError:
            continue
        assert other.releases_left((), step) <= most
    # Knowing the schedule, the best order is found afterwards: the same one.
    assert epsilon([(step, most)], DELTA, accountant="rdp") <= EPSILON
    assert epsilon([(step, most + 1)], DELTA, accountant="rdp") > EPSILON * (1 - 1e-6)


def test_filters_without_a_meaning():
    for wrong in ({"epsilon": 0.0}, {"delta": 1.0}, {"order": 1.0}, {"order": 1.2}):
        with pytest.raises(ValueError, match=r"epsilon|delta|order"):
            RenyiFilter(**{"epsilon": 1.0, "delta": 1e-5, "order": 20.0, **wrong})
    declared = RenyiFilter(epsilon=1.0, delta=1e-5, order=20.0)
    assert RenyiFilter.from_dict(json.loads(json.dumps(declared.to_dict()))) == declared
    with pytest.raises(ValueError, match="a filter has"):
        RenyiFilter.from_dict({"epsilon": 1.0})
    with pytest.raises(ValueError, match="belongs to a ledger"):
        epsilon([(full(1.0), 1)], 1e-5, accountant="filter")


# --- Budget before queries ----------------------------------------------------------------------


def test_all_or_nothing():
    budget = Budget(epsilon=1.0, delta=1e-6)
    query, step = full(30.0), poisson(2.0)
    with Ledger.in_memory(**KIND) as ledger:
        ledger.record(query, label="spent before")
        budget.require_all(ledger, [(query, 3), (step, 200)])
        with pytest.raises(BudgetExhaustedError, match=r"5003 planned releases.*Nothing was rel"):
            budget.require_all(ledger, [(query, 3), (step, 5000)])
        assert ledger.releases == 1
        sigma = budget.noise_multiplier(
            ledger, steps=500, sampling=step.sampling, before=[(query, 4)]
        )
        planned = [(query, 4), (poisson(sigma), 500)]
        budget.require_all(ledger, planned)
        assert epsilon([(query, 1), *planned], 1e-6) <= 1.0
        with pytest.raises(BudgetExhaustedError, match="no amount of noise"):
            budget.noise_multiplier(
                ledger, steps=1, sampling=step.sampling, before=[(full(4.0), 1)]
            )
    declared = RenyiFilter.planned(epsilon=0.3, delta=1e-6, mechanism=step)
    with Ledger.in_memory(**KIND, filter=declared) as ledger:
        with pytest.raises(BudgetExhaustedError):  # the ledger has declared less
            budget.require_all(ledger, [(step, 200)])
        budget.require_all(ledger, [(step, 20)])


# --- Run folders --------------------------------------------------------------------------------


def test_a_run_folder_states_its_filter(tmp_path):
    config = RunConfig.from_dict({
        "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": 16},
        "privacy": {"epsilon": 3.0, "accountant": "filter"},
        "training": {"steps": 6, "batch_size": 200},
    })  # fmt: skip
    result = train_run(config, tmp_path / "run", report=False)
    assert result.epsilon == 3.0
    assert open_run(tmp_path / "run").epsilon() == 3.0
    page = build(tmp_path / "run")
    assert page.claim.epsilon == 3.0
    assert "filter of order" in page.claim.accountant
    assert [point.epsilon for point in page.spending.curve][1] < 3.0  # what is used so far
    plan = tmp_path / "run" / "plan.json"
    data = json.loads(plan.read_text())
    data["plan"]["accountant"] = "pld"
    plan.write_text(json.dumps(data))
    claim = build(tmp_path / "run").claim
    assert claim.standing == "void"


def test_hyperband_and_early_stopping_keep_a_declared_budget():
    """Runs that are stopped, prolonged and given other noise, all by looking at their losses."""
    ledger = Ledger.in_memory(
        dataset_size=100, relation=Relation.ZERO_OUT,
        filter=RenyiFilter(epsilon=EPSILON, delta=1e-4, order=8.0),
    )  # fmt: skip

    def arm(lr, noise=20.0):
        return Run(engine=PrivacyEngine(ledger=ledger), lr=lr, noise_multiplier=noise, steps=500)

    def score(run):  # of what was released, and so of private records
        return float(sum(each.detach().norm() for each in run.model.parameters()))

    arms, taken = [arm(lr) for lr in (0.01, 0.1, 0.5, 1.0)], 0
    length = 3
    while len(arms) > 1:  # successive halving: half of them stop, the others go on for longer
        for each in arms:
            each.steps(length)
            taken += length
        arms = sorted(arms, key=score)
        arms, length = arms[: len(arms) // 2], 2 * length
    (best,) = arms
    assert ledger.releases == taken == 4 * 3 + 2 * 6
    best.engine.set_noise_multiplier(8.0)
    best.steps(4)
    with refused("would exceed", error=BudgetExhaustedError):
        for noise in (4.0, 2.0, 1.0, 0.5, 0.3):  # whatever is asked for next
            best.engine.set_noise_multiplier(noise)
            best.steps(40)
    assert ledger.filter.fits(ledger.filter.spent(ledger.history()))
    assert best.engine.get_epsilon() == EPSILON
    assert "filter of order" in str(best.engine.report())
