"""Steps that a resumed run repeats: how the ledger and the engine know them."""

import pytest
import torch

from clipless.errors import LedgerError, PrivacyError
from clipless.privacy import Ledger, Mechanism, PoissonSampling, PrivacyEngine, Relation
from tests.privacy.runs import Run, mlp

SAMPLING = PoissonSampling(dataset_size=1000, rate=0.1)
STEP = Mechanism(noise_multiplier=1.0, sampling=SAMPLING)
OTHER = Mechanism(noise_multiplier=2.0, sampling=SAMPLING)


def open_ledger(path):
    return Ledger(path, dataset_size=1000, relation=Relation.ADD_REMOVE)


def spend(ledger, count, mechanism=STEP):
    for _ in range(count):
        ledger.spend(mechanism)


def kill(ledger):
    """Let go of the file as the end of a killed process does: nothing is given back."""
    ledger._block, ledger._unspent = None, 0
    ledger.close()


def test_repeated_steps_are_counted_once(tmp_path):
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a")
    spend(ledger, 3)
    ledger.snapshot()
    saved = ledger.spent_in_run()
    assert saved == ((STEP, 3),)
    spend(ledger, 4)  # blocks of 1, 2, 4: one step is used of the last
    kill(ledger)
    ledger = open_ledger(tmp_path / "ledger")
    assert ledger.count(STEP) == 10
    ledger.begin_run("a", spent=saved)
    assert ledger.prepaid(STEP) == 7
    for step in range(4, 11):
        ledger.spend(STEP)
        assert ledger.count(STEP) == ledger.releases == 10
        assert ledger.spent_in_run() == ((STEP, step),)
    spend(ledger, 2)
    assert ledger.count(STEP) == 12
    assert ledger.spent_in_run() == ((STEP, 12),)


def test_what_is_not_repeated_stays_counted(tmp_path):
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a")
    spend(ledger, 8)
    ledger.close()
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a", spent=[(STEP, 2)])
    spend(ledger, 3)
    ledger.settle()
    assert ledger.prepaid(STEP) == 3
    ledger.close()
    assert ledger.count(STEP) == 8
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a", spent=[(STEP, 5)])
    spend(ledger, 4)
    assert ledger.count(STEP) == 9


def test_runs_do_not_use_each_others_steps(tmp_path):
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a")
    spend(ledger, 4)
    ledger.record(STEP, label="a statistic", count=5)
    ledger.begin_run("b")
    spend(ledger, 6)
    spend(ledger, 2, OTHER)
    ledger.close()
    ledger = open_ledger(tmp_path / "ledger")
    spend(ledger, 3)  # nobody's
    ledger.begin_run("a", spent=[(STEP, 1)])
    assert (ledger.prepaid(STEP), ledger.prepaid(OTHER)) == (3, 0)
    spend(ledger, 1, OTHER)
    assert ledger.releases == 4 + 5 + 6 + 2 + 3 + 1
    ledger.begin_run("b", spent=[(STEP, 6), (OTHER, 1)])
    assert (ledger.prepaid(STEP), ledger.prepaid(OTHER)) == (0, 1)
    ledger.begin_run("c", spent=[])
    assert ledger.prepaid(STEP) == 0


def test_a_name_is_used_again_only_to_resume(tmp_path):
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a")
    spend(ledger, 2)
    with pytest.raises(LedgerError, match="knows the run a already"):
        ledger.begin_run("a")
    with pytest.raises(LedgerError, match="has spent 3 steps"):
        ledger.begin_run("a", spent=[(STEP, 3)])
    with pytest.raises(LedgerError, match="has spent 1 steps"):
        ledger.begin_run("b", spent=[(STEP, 1)])
    with pytest.raises(ValueError, match="needs a name"):
        ledger.begin_run("")


# --- the engine, with a loop of one's own --------------------------------------------------------


def begin(path, state=None, replay=True, **options):
    torch.manual_seed(0)
    given = {"target_epsilon": 3.0, "steps": 20, "resume_from": state, "replay": replay} | options
    return Run(model=mlp(), engine=PrivacyEngine(ledger=path), **given)


def save(run):
    model = {name: each.clone() for name, each in run.model.state_dict().items()}
    return model, run.engine.state_dict()


def test_a_loop_of_ones_own_resumes(tmp_path):
    run = begin(tmp_path / "ledger").steps(8)
    model, state = save(run)
    run.steps(5)
    ended = [each.detach().clone() for each in run.model.parameters()]
    run.engine.close()
    again = begin(tmp_path / "ledger", state)
    again.model.load_state_dict(model)
    again.steps(5)
    assert all(map(torch.equal, ended, again.model.parameters()))
    assert again.engine.ledger.releases == 13
    assert again.engine.report().steps_taken == 13
    again.steps(7)
    assert again.engine.ledger.releases == 20
    assert again.engine.get_epsilon() <= 3.0


def test_fresh_randomness_is_paid_for(tmp_path):
    run = begin(tmp_path / "ledger", target_epsilon=8.0).steps(8)
    model, state = save(run)
    run.steps(5)
    ended = [each.detach().clone() for each in run.model.parameters()]
    run.engine.close()
    again = begin(tmp_path / "ledger", state, replay=False, target_epsilon=8.0)
    again.model.load_state_dict(model)
    again.steps(5)
    assert not any(map(torch.equal, ended, again.model.parameters()))
    assert again.engine.ledger.releases == 18


def test_a_state_is_complete_before_the_first_step(tmp_path):
    run = begin(tmp_path / "ledger")
    model, state = save(run)
    assert list(state["noise"]) == ["cpu"]
    run.steps(4)
    ended = [each.detach().clone() for each in run.model.parameters()]
    run.engine.close()
    again = begin(tmp_path / "ledger", state)
    again.model.load_state_dict(model)
    again.steps(4)
    assert all(map(torch.equal, ended, again.model.parameters()))
    assert again.engine.ledger.releases == 4


def test_another_plan_or_device_is_refused(tmp_path):
    run = begin(tmp_path / "ledger")
    _, state = save(run)
    run.engine.close()
    with pytest.raises(PrivacyError, match="noise: optimal then, global now"):
        begin(tmp_path / "ledger", state, noise="global")
    elsewhere = {**state, "noise": {"cuda:0": state["noise"]["cpu"]}}
    with pytest.raises(PrivacyError, match="resume on the same device"):
        begin(tmp_path / "ledger", elsewhere)


def test_noise_that_was_changed_goes_on(tmp_path):
    run = begin(tmp_path / "ledger", target_epsilon=8.0).steps(2)
    run.engine.set_noise_multiplier(5.0)
    run.steps(3)
    model, state = save(run)
    run.steps(2)
    run.engine.close()
    again = begin(tmp_path / "ledger", state, target_epsilon=8.0)
    again.model.load_state_dict(model)
    assert again.engine.plan.noise_multiplier == 5.0
    again.steps(3)
    assert sorted(count for _, count in again.engine.ledger.history()) == [2, 6]


def test_further_steps(tmp_path):
    run = begin(tmp_path / "ledger").steps(3)
    later = run.engine.get_epsilon(further_steps=4)
    run.steps(4)
    assert later == run.engine.get_epsilon()
