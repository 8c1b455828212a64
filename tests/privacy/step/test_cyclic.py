"""Cyclic Poisson sampling with correlated noise, as the engine runs it."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.accounting import CyclicPoissonSampling, Mechanism, PoissonSampling, Relation, epsilon
from clipless.accounting.correlated import OptimizerWorkload, noise_candidates
from clipless.audit import record, with_empty_record
from clipless.errors import PrivacyError
from clipless.privacy import BatchOptions, Correlated, Plan, PrivacyOptions
from clipless.privacy.sampling._samplers import IndexSampler
from tests.privacy.epochs import watched
from tests.privacy.runs import Run, examples, mlp
from tests.privacy.step.test_epochs import largest_sensitivity, mixing

SIZE, STEPS, GROUPS = 23, 12, 4
CYCLIC = CyclicPoissonSampling(dataset_size=SIZE, rate=0.2, groups=GROUPS)


def cyclic_run(noise="correlated", steps=STEPS, **options):
    options.setdefault("data", examples(SIZE))
    return Run(batch_size=5, sampling=CYCLIC, noise=noise, steps=steps, **options)


def test_an_example_has_one_chance_in_a_round_and_the_stated_rate():
    sampling = CyclicPoissonSampling(dataset_size=3000, rate=0.05, groups=4)
    sampler, seen = IndexSampler(sampling=sampling), []
    for draw in sampler.take(steps=40):
        assert bool((draw[1:] > draw[:-1]).all())
        seen.append(set(draw.tolist()))
    for first in range(37):  # any four steps in a row
        window = seen[first : first + 4]
        assert sum(map(len, window)) == len(set.union(*window))
    counts = np.bincount([i for each in seen for i in each], minlength=3000)
    assert counts.mean() == pytest.approx(40 * 0.05, rel=0.03)
    assert counts.max() <= 10  # ten rounds
    variance = 10 * 0.2 * 0.8  # of a binomial: chances of different rounds are independent
    assert counts.var() == pytest.approx(variance, rel=0.1)
    sizes = np.array([len(each) for each in seen])
    assert sizes.mean() == pytest.approx(150, rel=0.04)


@pytest.mark.parametrize("noise", ["correlated", Correlated(bands=3)])
def test_a_round_costs_its_longest_column_and_no_less(noise):
    run = cyclic_run(noise)
    key = run.engine.session.noise._key
    watcher, taken = watched(run, STEPS)
    watcher.key = key
    matrix, plan = mixing(run, watcher), run.engine.plan
    assert np.allclose(matrix, plan.strategy.matrix(), atol=2e-3)
    ((mechanism, rounds),) = run.engine.ledger.history()
    assert rounds == STEPS // GROUPS
    paid_each = (plan.noise_multiplier / mechanism.noise_multiplier) ** 2
    for begin in range(0, STEPS, GROUPS):
        # What one example can add in a round, by brute force over those that were drawn.
        steps = range(begin, begin + GROUPS)
        part = [batch if step in steps else [] for step, batch in enumerate(taken)]
        worst = largest_sensitivity(matrix, part, SIZE)
        assert worst <= paid_each * (1 + 3e-3)
    columns = np.square(matrix).sum(axis=0)
    assert columns.max() == pytest.approx(paid_each, rel=3e-3)
    # No two columns of different rounds of one example share a row.
    for one, other in itertools.combinations(range(STEPS), 2):
        if (other - one) % GROUPS == 0:
            assert abs(matrix[:, one] @ matrix[:, other]) < 1e-2


def test_epsilon_is_that_of_rounds_at_the_rate_of_a_group():
    run = cyclic_run(target_epsilon=3.0, engine=PrivacyEngine())
    spent = []
    for _ in range(STEPS):
        run.step()
        spent.append(run.engine.get_epsilon())
    assert len(set(spent)) == 3
    sigma = run.engine.ledger.history()[0][0].noise_multiplier
    plain = PoissonSampling(dataset_size=SIZE, rate=0.8)
    round_ = Mechanism(noise_multiplier=sigma, sampling=plain)
    assert spent[-1] == epsilon([(round_, 3)], run.engine.plan.delta)
    assert 0.99 * 3.0 < spent[-1] <= 3.0
    for accountant in ("pld", "rdp"):
        cyclic = Mechanism(noise_multiplier=sigma, sampling=CYCLIC)
        one, other = ([(each, 3)] for each in (cyclic, round_))
        assert epsilon(one, 1e-4, accountant=accountant) == epsilon(
            other, 1e-4, accountant=accountant
        )


def test_plan_and_mechanism_are_kept():
    plan = cyclic_run().engine.plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Mechanism.from_dict(plan.mechanism.to_dict()) == plan.mechanism
    assert "one of 4 groups in turn" in str(plan)


def test_a_killed_run_repeats_and_goes_on_with_its_rounds(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = cyclic_run(engine=PrivacyEngine(ledger=path)).steps(3)
    state, model = copy.deepcopy(run.engine.state_dict()), mlp()
    model.load_state_dict(run.model.state_dict())
    run.steps(4)
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.engine.close()
    again = cyclic_run(model=model, engine=PrivacyEngine(ledger=path), resume_from=state).steps(4)
    assert all(map(torch.equal, weights, again.model.parameters()))
    assert again.engine.ledger.releases == 2  # of what is repeated nothing is paid again
    again.steps(STEPS - 7)
    assert again.engine.ledger.releases == 3
    assert again.engine.get_epsilon() == again.engine.plan.epsilon()


def test_replays_on_neighbours_pass():
    def run(data):
        torch.manual_seed(0)
        model = mlp()
        engine, criterion = PrivacyEngine(), losses.CrossEntropy()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*data), batch_size=5), criterion=criterion,
            noise_multiplier=1.0, options=PrivacyOptions(
                sampling=CYCLIC, noise="correlated", steps=8),
        )  # fmt: skip
        taken = 0
        while taken < 8:
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                taken += 1
                if taken == 8:
                    break
        return [p.detach() for p in model.parameters()], engine.get_epsilon()

    data = examples(SIZE)
    recording = record(run, data)
    results = [recording.replay(with_empty_record(data, index)) for index in (0, 7, 22)]
    assert all(each.passed for each in results), results
    assert max(max(each.largest.values()) for each in results) > 0.05


def test_the_rule_says_which_sampling_to_take():
    found = noise_candidates(
        OptimizerWorkload(steps=40), dataset_size=50_000, batch_size=500, target_epsilon=8.0,
        target_delta=1e-6, modes=("poisson", "cyclic"), most_memory=4,
    )  # fmt: skip
    assert found[0].mode == "cyclic"
    best = found[0].sampling
    assert isinstance(best, CyclicPoissonSampling)
    assert best.groups >= found[0].strategy.bands
    assert found[0].relative_error < 1.0
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    strategy, error = Correlated(bands=4).chosen(optimizer, best, steps=40)
    assert strategy.bands == 4
    assert error < 1


def test_what_is_not_accounted_for_is_refused():
    with pytest.raises(PrivacyError, match="not padded"):
        cyclic_run(batches=BatchOptions(pad=True))
    with pytest.raises(PrivacyError, match="meet its own noise"):
        cyclic_run(Correlated(bands=5))
    with pytest.raises(ValueError, match="zero-out"):
        Mechanism(noise_multiplier=1.0, sampling=CYCLIC, relation=Relation.REPLACE_ONE)
    for wrong in ({"groups": 0}, {"groups": 24}, {"rate": 0.3}, {"rate": 0.0}):
        with pytest.raises(ValueError, match="must lie in"):
            CyclicPoissonSampling(**{"dataset_size": SIZE, "rate": 0.2, "groups": 4, **wrong})
