"""Steps that a resumed run repeats: how the ledger and the engine know them."""

import pytest
import torch

from clipless.errors import LedgerError, PrivacyError
from clipless.ledger import EntryKind, read_ledger
from clipless.privacy import Ledger, Mechanism, PoissonSampling, PrivacyEngine, Relation
from tests.privacy.runs import Run, mlp
from tests.training.ledgers import without

SAMPLING = PoissonSampling(dataset_size=1000, rate=0.1)
STEP = Mechanism(noise_multiplier=1.0, sampling=SAMPLING)


def open_ledger(path):
    return Ledger(path, dataset_size=1000, relation=Relation.ZERO_OUT)


def spend(ledger, count, mechanism=STEP):
    for _ in range(count):
        ledger.spend(mechanism)


def kill(ledger):
    """Let go of the file as the end of a killed process does: nothing is given back."""
    ledger._block, ledger._unspent = None, 0
    ledger.close()


def test_what_a_run_has_released_is_found_again(tmp_path):
    ledger = open_ledger(tmp_path / "ledger")
    ledger.begin_run("a")
    for step in range(3):
        spend(ledger, 1)
        ledger.release(step, f"{step:016x}")
    saved = ledger.spent_in_run()
    assert saved == ((STEP, 3),)
    spend(ledger, 4)  # blocks of 1, 2, 4: one step is used of the last
    ledger.release(3, "f" * 16)
    ledger.begin_run("b")
    ledger.release(0, "e" * 16)
    assert ledger.count(STEP) == 7  # what was given back does not count
    kill(ledger)
    ledger = open_ledger(tmp_path / "ledger")
    assert ledger.count(STEP) == 7
    ledger.begin_run("a", spent=saved)
    assert ledger.released("a") == {**{n: f"{n:016x}" for n in range(3)}, 3: "f" * 16}
    assert ledger.released("b") == {0: "e" * 16}
    assert ledger.released("c") == {}
    ledger.repeat(STEP)
    assert (ledger.count(STEP), ledger.spent_in_run()) == (7, ((STEP, 4),))
    spend(ledger, 2)
    assert (ledger.count(STEP), ledger.spent_in_run()) == (9, ((STEP, 6),))


def test_a_ledger_without_digests_can_be_read(tmp_path):
    """Its steps are paid for again if they are repeated: nothing tells what they released."""
    run = begin(tmp_path / "ledger", target_epsilon=8.0).steps(4)
    model, state = save(run)
    run.steps(3)
    ended = [each.detach().clone() for each in run.model.parameters()]
    run.engine.close()
    entries = read_ledger(tmp_path / "ledger").entries
    without(tmp_path / "ledger", [e.line for e in entries if e.kind is EntryKind.RELEASE])
    again = begin(tmp_path / "ledger", state, target_epsilon=8.0)
    again.model.load_state_dict(model)
    again.steps(3)
    assert not any(map(torch.equal, ended, again.model.parameters()))
    assert again.engine.ledger.releases == 10


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


def begin(path, state=None, replay=True, accountant="pld", **options):
    torch.manual_seed(0)
    given = {"target_epsilon": 3.0, "steps": 20, "resume_from": state, "replay": replay} | options
    return Run(model=mlp(), engine=PrivacyEngine(ledger=path, accountant=accountant), **given)


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
    assert list(state["noise"]) == ["chacha20"]
    run.steps(4)
    ended = [each.detach().clone() for each in run.model.parameters()]
    run.engine.close()
    again = begin(tmp_path / "ledger", state)
    again.model.load_state_dict(model)
    again.steps(4)
    assert all(map(torch.equal, ended, again.model.parameters()))
    assert again.engine.ledger.releases == 4


def test_another_plan_or_noise_of_an_earlier_version_is_refused(tmp_path):
    run = begin(tmp_path / "ledger")
    _, state = save(run)
    run.engine.close()
    with pytest.raises(PrivacyError, match="noise: optimal then, global now"):
        begin(tmp_path / "ledger", state, noise="global")
    earlier = {**state, "noise": {"cpu": state["noise"]["chacha20"]}}
    with pytest.raises(PrivacyError, match="earlier version"):
        begin(tmp_path / "ledger", earlier)


def test_noise_that_was_changed_goes_on(tmp_path):
    run = begin(tmp_path / "ledger", target_epsilon=8.0, accountant="filter").steps(2)
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
