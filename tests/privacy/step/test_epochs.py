"""Epochs in one order, as the engine runs them: what is added, what is paid, what is repeated."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.accounting.correlated import BandedStrategy, OptimizerWorkload, error_by_step
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.kernels import GRID_STEPS, KeyStream, grid_noise, next_key
from clipless.privacy import Correlated, FixedOrder, PrivacyOptions, PrivateLoader
from clipless.privacy import _schedule as schedule_module
from clipless.privacy.noise import _correlated as noise_module
from tests.privacy.epochs import epochs_run, paid, watched
from tests.privacy.runs import Run, examples, mlp

STEPS, PASS = 12, 5


def mixing(run, watcher):
    """C, as it follows from the z that the run's key gives and the noise that was released."""
    keys = [watcher.key]
    for _ in range(len(watcher.before) - 1):
        keys.append(next_key(keys[-1]))
    sizes = [count for _, count in watcher.queries[0]]
    z = (
        torch.stack(
            [
                torch.cat([grid_noise(n, KeyStream(key), i) for i, n in enumerate(sizes)])
                for key in keys
            ]
        ).double()
        / GRID_STEPS
    )
    found = np.zeros((len(keys), len(keys)))
    released = watcher.noise.numpy()
    for step in range(len(keys)):
        row = np.linalg.lstsq(released[: step + 1].T, z[step].numpy(), rcond=None)[0]
        found[step, : step + 1] = row
    return found


def run_and_mixing(**options):
    run = epochs_run(steps=STEPS, **options)
    key = run.engine.session.noise._key
    watcher, taken = watched(run, STEPS)
    watcher.key = key
    return run, mixing(run, watcher), taken, watcher


def largest_sensitivity(matrix, taken, size):
    """Squared, by brute force: over all examples, and all signs of what they contribute."""
    worst = 0.0
    for example in range(size):
        columns = matrix[:, [step for step, batch in enumerate(taken) if example in batch]]
        for signs in itertools.product((-1.0, 1.0), repeat=columns.shape[1]):
            worst = max(worst, float(np.square(columns @ np.array(signs)).sum()))
        gram = columns.T @ columns  # no direction is longer than the sum of these
        assert np.abs(gram).sum() <= worst * (1 + 1e-3) + 1e-3
    return worst


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "correlated"},
        {"noise": Correlated(bands=3)},
        {"noise": "correlated", "micro_batch_size": 2},
        {"noise": "correlated", "lr": 0.5},
    ],
)
def test_what_is_paid_is_the_sensitivity_of_what_was_added(options):
    run, matrix, taken, _ = run_and_mixing(**options)
    strategy = run.engine.plan.strategy
    assert np.allclose(matrix, strategy.matrix(), atol=2e-3)
    assert [len(batch) for batch in taken[:PASS]] == [5, 5, 5, 5, 3]
    assert taken[:PASS] == taken[PASS : 2 * PASS]
    found = largest_sensitivity(matrix, taken, 23)
    assert found <= paid(run) * (1 + 2e-3)
    assert found == pytest.approx(paid(run), rel=0.02)  # and no more than that


def test_the_check_finds_what_it_is_for(monkeypatch):
    """A strategy of more bands than a pass has steps, and passes that are paid too little for."""
    cheap = schedule_module.pass_costs
    monkeypatch.setattr(
        schedule_module, "pass_costs",
        lambda *given, **named: tuple(0.8 * cost for cost in cheap(*given, **named)),
    )  # fmt: skip
    schedule_module._costs.cache_clear()
    run, matrix, taken, _ = run_and_mixing()
    assert largest_sensitivity(matrix, taken, 23) > 1.1 * paid(run)
    schedule_module._costs.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(schedule_module.Schedule, "__post_init__", lambda self: None)
    wide = BandedStrategy.square_root(steps=STEPS, bands=8)
    monkeypatch.setattr(Correlated, "chosen", lambda *_, **__: (wide, 0.5))
    monkeypatch.setattr(schedule_module, "pass_costs", cheap)
    monkeypatch.setattr(
        BandedStrategy, "pass_costs",
        lambda self, steps_per_pass: cheap(self.column_squares().tolist(),
                                           steps_per_pass=steps_per_pass),
    )  # fmt: skip
    run, matrix, taken, _ = run_and_mixing()
    with pytest.raises(AssertionError):
        assert largest_sensitivity(matrix, taken, 23) <= 1.1 * paid(run)


def test_measured_errors_of_sums_are_the_computed_ones():
    """Of what 18,000 coordinates of the engine's releases add up to."""
    rows = []
    for seed in range(4):
        model = nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(6, 512), lip.SpectralLinear(512, 3)
        )
        run = epochs_run(steps=STEPS, engine=PrivacyEngine(insecure_seed=seed), model=model)
        watcher, _ = watched(run, STEPS)
        rows.append(watcher.noise)
    noise = torch.cat(rows, dim=1)
    sums = OptimizerWorkload(steps=STEPS).matrix()
    measured = (torch.from_numpy(sums) @ noise).square().mean(dim=1).sqrt().numpy()
    computed = error_by_step(sums, run.engine.plan.strategy)
    assert float(np.linalg.norm(measured) / np.linalg.norm(computed)) == pytest.approx(1, abs=0.02)
    assert measured == pytest.approx(computed, rel=0.02)
    assert computed[-1] < 0.7 * STEPS**0.5


def test_independent_noise_costs_a_pass_what_a_full_batch_costs():
    run = epochs_run(noise="optimal", noise_multiplier=2.0)
    expected = []
    for step in range(STEPS):
        run.step()
        expected.append(1 + step // PASS)
        assert run.engine.ledger.releases == expected[-1]
    whole = Run(data=examples(23), sampling="full_batch", noise_multiplier=2.0).steps(3)
    assert run.engine.plan.epsilon() == whole.engine.plan.epsilon(steps=3)


def test_epsilon_while_it_runs_and_the_end_of_the_budget():
    run = epochs_run(target_epsilon=3.0, engine=PrivacyEngine())
    plan, spent = run.engine.plan, []
    for _ in range(STEPS):
        run.step()
        spent.append(run.engine.get_epsilon())
    assert len(set(spent)) == 3
    assert spent == sorted(spent)
    assert spent[0] == plan.epsilon(steps=1) == plan.epsilon(steps=PASS)
    assert spent[-1] == plan.epsilon() <= 3.0 < 1.001 * spent[-1]
    assert not run.engine.allows_step()
    with pytest.raises(BudgetExhaustedError, match="planned for 12 steps"):
        run.step()
    independent = epochs_run(target_epsilon=3.0, engine=PrivacyEngine(), noise="optimal", steps=10)
    independent.steps(10)
    with pytest.raises(BudgetExhaustedError, match="exceed"):
        independent.step()


def test_a_declared_filter_counts_passes():
    run = epochs_run(target_epsilon=3.0, engine=PrivacyEngine(accountant="filter"))
    run.steps(STEPS)
    assert run.engine.ledger.filter.spent(run.engine.ledger.history()) > 0
    assert run.engine.get_epsilon() == 3.0
    with pytest.raises(PrivacyError, match="stays as it was planned"):
        run.engine.set_noise_multiplier(5.0)


def test_noise_whose_scale_changes_is_that_of_the_plan():
    """Bounds that are proved anew change the grids; in their units the strategy is the same."""
    run = epochs_run(steps=STEPS)
    key = run.engine.session.noise._key
    first, taken = watched(run, 4)
    run.model[0].norm = 0.25
    second, later = watched(run, STEPS - 4)
    assert second.queries[0][0][0].deviation < 0.5 * first.queries[0][0][0].deviation
    for name in ("before", "after", "queries"):
        getattr(first, name).extend(getattr(second, name))
    first.key = key
    assert np.allclose(mixing(run, first), run.engine.plan.strategy.matrix(), atol=2e-3)
    assert largest_sensitivity(mixing(run, first), taken + later, 23) <= paid(run) * (1 + 2e-3)


# --- goings-on: skipped steps, abandoned epochs, resumed and copied runs --------------------------


def test_an_abandoned_epoch_goes_on_where_it_was():
    run = epochs_run()
    taken = []
    for stop in (2, 1, 4):
        for number, (x, y) in enumerate(run.loader, start=1):
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            taken.append(run.loader.current.indices.tolist())
            if number == stop:
                break
    run._batches = iter(())
    assert taken == [list(range(5 * (n % 5), min(23, 5 * (n % 5) + 5))) for n in range(7)]
    assert run.engine.ledger.releases == 2


def test_skipped_steps_are_paid_for_and_their_noise_is_not_released():
    run = epochs_run()
    run.step()
    for _ in range(5):
        run.batch()
    with pytest.warns(UserWarning, match="did not lead to a step"):
        run.step()
    assert run.engine.session.noise.step == run.loader.current.step + 1
    assert run.engine.ledger.releases == 2


def saved(run):
    return {
        "engine": copy.deepcopy(run.engine.state_dict()),
        "model": copy.deepcopy(run.model.state_dict()),
        "optimizer": copy.deepcopy(run.optimizer.state_dict()),
    }


def resumed(state, ledger, **options):
    model = mlp()
    model.load_state_dict(state["model"])
    return epochs_run(
        model=model, engine=PrivacyEngine(ledger=ledger), resume_from=state["engine"], **options
    )


def begun(folder, noise="correlated", **options):
    torch.manual_seed(0)
    return epochs_run(engine=PrivacyEngine(ledger=folder / "ledger.jsonl"), noise=noise, **options)


@pytest.mark.parametrize("noise", ["correlated", "optimal"])
def test_a_killed_run_repeats_and_goes_on_with_its_noise(tmp_path, noise):
    """What the ledger knows comes out the same and is free, and passes go on as they were."""
    run = begun(tmp_path, noise).steps(3)
    state = saved(run)
    run.steps(4)
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.engine.close()
    again = resumed(state, tmp_path / "ledger.jsonl", noise=noise).steps(4)
    assert all(map(torch.equal, weights, again.model.parameters()))
    assert again.engine.ledger.releases == 2
    assert again.engine.session._book.first == 0
    again.steps(STEPS - 7)
    assert again.engine.ledger.releases == 3
    assert again.engine.get_epsilon() == again.engine.plan.epsilon()


def test_noise_after_a_resumption_takes_back_that_of_before(tmp_path):
    run = begun(tmp_path)
    first, _ = watched(run, 4)
    state = saved(run)
    run.engine.close()
    again = resumed(state, tmp_path / "ledger.jsonl")
    key = again.engine.session.noise._key
    second, _ = watched(again, 1)
    sizes = [count for _, count in second.queries[0]]
    z = (
        torch.cat([grid_noise(n, KeyStream(key), i) for i, n in enumerate(sizes)]).double()
        / GRID_STEPS
    )
    row = torch.from_numpy(run.engine.plan.strategy.matrix()[4, :5])
    assert torch.allclose(row @ torch.cat([first.noise, second.noise]), z, atol=2e-3)


@pytest.mark.parametrize("why", ["released", "replay", "lost"])
def test_noise_begins_anew_where_steps_may_have_been_released_twice(tmp_path, monkeypatch, why):
    """Then passes are counted from there: three steps, and another in the middle of the first."""
    run = begun(tmp_path).steps(3)
    state = saved(run)
    ledger = tmp_path / "ledger.jsonl"
    if why == "released":  # and differ: another learning rate
        state["optimizer"]["param_groups"][0]["lr"] = 0.9
        run.steps(2)
    if why == "lost":  # an accelerator: what was released is not read
        monkeypatch.setattr("clipless.privacy.step._book.may_look_at", lambda tensor: False)
        run.steps(1)
    run.engine.close()
    other = resumed(
        state, ledger, replay=why != "replay", data=examples(23, seed=int(why == "released"))
    )
    if why == "released":
        with pytest.warns(UserWarning, match="does not come out"):
            other.step()
    else:
        other.step()
    assert other.engine.session._book.first == 3
    assert other.engine.ledger.releases == 2
    other.steps(5)
    assert other.engine.ledger.releases == 3  # steps 3 to 7 were a pass, and 8 begins another
    costs = schedule_module.pass_costs(
        run.engine.plan.strategy.column_squares()[3:].tolist(), steps_per_pass=PASS
    )
    first = run.engine.plan.strategy.pass_costs(steps_per_pass=PASS)[0]
    assert paid(other) == pytest.approx(first + sum(costs[:2]), rel=1e-9)


def test_two_continuations_of_one_state_do_not_share_noise(tmp_path):
    """The first goes on; the second, and the run itself if it lives, begin anew."""
    run = begun(tmp_path).steps(3)
    state = saved(run)
    options = {"replay": True}
    engine = run.engine
    second = PrivacyEngine(ledger=engine.ledger)
    model = mlp()
    model.load_state_dict(state["model"])
    one = epochs_run(model=model, engine=second, resume_from=state["engine"], **options)
    assert one.engine.session._book.first == 0
    one.step()
    run.step()
    assert run.engine.session._book.first == 3
    third = PrivacyEngine(ledger=engine.ledger)
    model = mlp()
    model.load_state_dict(state["model"])
    two = epochs_run(model=model, engine=third, resume_from=state["engine"], **options)
    assert two.engine.session._book.first == 3


def test_an_older_state_of_a_continued_run_begins_anew_in_another_process(tmp_path):
    run = begun(tmp_path).steps(3)
    state = saved(run)
    run.engine.close()
    one = resumed(state, tmp_path / "ledger.jsonl").steps(1)
    one.engine.close()
    two = resumed(state, tmp_path / "ledger.jsonl")
    assert two.engine.session._book.first == 3
    two.steps(1)
    assert two.engine.ledger.releases == 2


def test_a_state_keeps_what_later_steps_need_and_no_more(tmp_path):
    run = epochs_run(noise=Correlated(bands=3))
    names = []
    for _ in range(STEPS):
        run.step()
        kept = {name.split("/")[0] for name in run.engine.state_dict()["noise"] if "/" in name}
        names.append(len(kept))
    assert names == [1, *[2] * (STEPS - 2), 0]
    whole = run.engine.state_dict()["noise"]
    assert set(whole) == {"step", "chacha20"}


# --- what is refused ------------------------------------------------------------------------------


def loader(**options):
    return DataLoader(TensorDataset(*examples(23)), batch_size=5, **options)


def private(data_loader, **options):
    model = mlp()
    return PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data_loader, criterion=losses.CrossEntropy(), noise_multiplier=1.0,
        options=PrivacyOptions(**options),
    )  # fmt: skip


def test_loaders_that_reshuffle_are_refused():
    with pytest.raises(PrivacyError, match=r"shuffles anew in every epoch.*shuffle_seed=0"):
        private(loader(shuffle=True), sampling="epochs")
    order = FixedOrder(dataset_size=23, batch_size=5)
    with pytest.raises(PrivacyError, match="shuffles anew"):
        private(loader(shuffle=True), sampling=order)
    with pytest.raises(PrivacyError, match="shuffles anew"):
        PrivateLoader(loader(shuffle=True), sampling=order)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 23, 23)
    with pytest.raises(PrivacyError, match="WeightedRandomSampler"):
        private(loader(sampler=weighted), sampling="epochs")


def test_correlated_noise_without_epochs_a_length_or_room():
    with pytest.raises(PrivacyError, match="sampling='epochs'"):
        private(loader(), noise="correlated", steps=10)
    with pytest.raises(PrivacyError, match="number of steps"):
        private(loader(), noise="correlated", sampling="epochs")
    with pytest.raises(PrivacyError, match="use at most 5"):
        private(loader(), noise=Correlated(bands=6), sampling="epochs", steps=10)


def test_a_loader_that_has_begun_a_pass_is_not_taken_over():
    used = PrivateLoader(loader(), sampling=FixedOrder(dataset_size=23, batch_size=5))
    next(iter(used))
    with pytest.raises(PrivacyError, match="begun a pass"):
        private(used)


def test_a_few_numbers_of_the_plan_and_the_report():
    run = epochs_run(target_epsilon=3.0, engine=PrivacyEngine())
    text = str(run.engine.report())
    assert "5 of 23 in one order, 5 steps a pass" in text
    assert "bands" in text
    plan = run.engine.plan
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert plan.strategy_error < 0.8
    assert math.isclose(plan.sensitivities["1.weight"] * 5, 2**0.5, rel_tol=0.01)
    assert noise_module.CorrelatedNoise is type(run.engine.session.noise)
