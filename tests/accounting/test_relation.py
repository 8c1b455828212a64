"""Zero-out is the relation of new runs; what was kept under add/remove keeps its meaning."""

import json

import pytest

from clipless import PrivacyEngine
from clipless.errors import LedgerError
from clipless.ledger._format import header_fields
from clipless.ledger._writing import encode
from clipless.privacy import Ledger, Mechanism, Plan, PoissonSampling, Relation, epsilon
from clipless.runs import RunConfig
from tests.privacy.misuse_helpers import refused
from tests.privacy.runs import Run, mlp

ADD_REMOVE, REPLACE_ONE, ZERO_OUT = Relation.ADD_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT


def old_ledger(path, size=100, releases=3):
    """A ledger as earlier versions wrote it."""
    sampling = PoissonSampling(dataset_size=size, rate=0.2)
    step = Mechanism(noise_multiplier=1.0, sampling=sampling, relation=ADD_REMOVE)
    header, digest = encode(header_fields(dataset_size=size, relation=ADD_REMOVE), "")
    entry = {"line": 2, "kind": "record", "time": "2026-01-01T00:00:00+00:00"}
    entry |= {"mechanism": step.to_dict(), "count": releases, "label": "training step"}
    path.write_text(f"{header}\n{encode(entry, digest)[0]}\n")
    return step


def test_new_runs_are_zero_out():
    run = Run().steps(2)
    assert run.engine.plan.relation is ZERO_OUT
    assert run.engine.ledger.relation is ZERO_OUT
    report = str(run.engine.report())
    assert "replacing one example by an empty one" in report
    assert "adding or removing" not in report
    assert Run(sampling="full_batch").engine.plan.relation is ZERO_OUT
    assert Run(sampling="fixed_size").engine.plan.relation is REPLACE_ONE


@pytest.mark.parametrize("relation", ["add_remove", ADD_REMOVE])
def test_nothing_new_begins_under_add_remove(relation, tmp_path):
    with refused("add_remove", "zero_out", "empty record"):
        Run(relation=relation)
    with refused("add_remove", "zero_out"):
        Ledger(tmp_path / "new", dataset_size=10, relation=relation)
    with refused("add_remove"):
        Ledger.in_memory(dataset_size=10, relation=relation)


def test_an_old_ledger_is_read_and_continued_under_its_own_relation(tmp_path):
    step = old_ledger(tmp_path / "ledger")
    engine = PrivacyEngine(ledger=tmp_path / "ledger")
    run = Run(engine=engine).steps(2)
    assert engine.plan.relation is ADD_REMOVE
    assert dict(engine.ledger.history()) == {step: 5}
    assert engine.get_epsilon(1e-4) == epsilon([(step, 5)], 1e-4)
    assert "adding or removing one example" in str(engine.report())
    saved = engine.plan.to_dict()
    assert Plan.from_dict(json.loads(json.dumps(saved))) == engine.plan
    state = engine.state_dict()
    engine.close()
    engine = PrivacyEngine(ledger=tmp_path / "ledger")
    again = Run(mlp(), engine=engine, resume_from=state)
    again.model.load_state_dict(run.model.state_dict())
    assert again.steps(1).engine.plan.relation is ADD_REMOVE


def test_an_old_ledger_is_not_one_of_another_relation(tmp_path):
    old_ledger(tmp_path / "ledger")
    with pytest.raises(LedgerError, match="kept for 100 examples under add_remove"):
        Ledger(tmp_path / "ledger", relation=REPLACE_ONE)
    with refused("add_remove"):
        Run(engine=PrivacyEngine(ledger=tmp_path / "ledger"), sampling="fixed_size")
    with Ledger.in_memory(dataset_size=100, relation=ZERO_OUT) as ledger:
        with pytest.raises(LedgerError, match="add_remove"):
            ledger.record(old_ledger(tmp_path / "other"), label="x")
        with pytest.raises(LedgerError, match="add_remove"):
            ledger.absorb((tmp_path / "other").read_text())


def test_a_run_is_resumed_with_the_delta_it_had(tmp_path):
    """Earlier versions had another default."""
    engine = PrivacyEngine(ledger=tmp_path / "ledger")
    run = Run(engine=engine, target_delta=5e-4).steps(1)
    state, model = engine.state_dict(), run.model.state_dict()
    engine.close()
    again = Run(mlp(), engine=PrivacyEngine(ledger=tmp_path / "ledger"), resume_from=state)
    again.model.load_state_dict(model)
    assert again.steps(1).engine.plan.delta == 5e-4


def test_configurations_of_earlier_versions_are_read():
    config = {"privacy": {"epsilon": 3.0, "relation": "add_remove"}, "data": {"name": "digits"}}
    assert RunConfig.from_dict(config).privacy.relation == "add_remove"


def test_plans_under_an_unknown_relation_are_refused():
    data = Run().engine.plan.to_dict()
    with pytest.raises(ValueError, match="unknown relation 'other'"):
        Plan.from_dict({**data, "relation": "other"})
