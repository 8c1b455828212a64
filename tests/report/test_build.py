"""The report of a real run: what is in it, where it comes from, and what it says is missing."""

import json
import math
import shutil

import pytest

from clipless.privacy import FullBatch, Mechanism, Plan, PoissonSampling, epsilon
from clipless.report import RunReport, build, write_report
from clipless.report._pages import PRIVATE_PARTS, PUBLIC_PARTS
from tests.report.conftest import STATISTICS
from tests.training.small import DATA, STEPS, trainer


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_building_a_report_changes_nothing(run):
    before = contents(run)
    build(run)
    assert contents(run) == before


def test_epsilon_is_recomputed_from_the_ledger(full):
    folder, claimed = full
    report = build(folder)
    plan = Plan.from_dict(json.loads((folder / "plan.json").read_text())["plan"])
    whole = FullBatch(dataset_size=100)
    history = [(Mechanism(noise_multiplier=s, sampling=whole), 1) for s in STATISTICS.values()]
    expected = epsilon([*history, (plan.mechanism, STEPS)], plan.delta)
    assert isinstance(plan.sampling, PoissonSampling)
    assert report.claim.epsilon == report.spending.epsilon == pytest.approx(expected, rel=1e-9)
    assert report.claim.epsilon == pytest.approx(claimed, rel=1e-9)
    assert report.sound
    assert report.spending.steps == STEPS
    assert report.claim.releases == STEPS + len(STATISTICS)


def test_the_curve_begins_with_the_statistics_and_ends_at_epsilon(run):
    spent = build(run).spending
    steps, values = zip(*((point.step, point.epsilon) for point in spent.curve), strict=True)
    assert (steps[0], steps[-1]) == (0, STEPS)
    assert list(steps) == sorted(set(steps))
    assert list(values) == sorted(values)
    assert 0 < values[0] < values[-1] == spent.epsilon <= 3.0
    plan = Plan.from_dict(json.loads((run / "plan.json").read_text())["plan"])
    whole = FullBatch(dataset_size=100)
    before = [(Mechanism(noise_multiplier=s, sampling=whole), 1) for s in STATISTICS.values()]
    for step, value in zip(steps, values, strict=True):
        assert value == epsilon([*before, (plan.mechanism, step)], plan.delta)


def test_statistics_are_listed_with_their_cost(run):
    spent = build(run).spending
    items = {item.label: item for item in spent.items}
    assert set(items) == {*STATISTICS, "training step"}
    for label, multiplier in STATISTICS.items():
        item = items[label]
        assert not item.is_step
        assert item.noise_multipliers == (multiplier,)
        # A full-batch release of so much noise, alone: the Gaussian mechanism.
        alone = Mechanism(noise_multiplier=multiplier, sampling=FullBatch(dataset_size=100))
        assert item.epsilon_alone == epsilon([(alone, 1)], spent.delta)
        assert 0 < item.epsilon_added < item.epsilon_alone
    assert items["training step"].is_step
    assert items["training step"].share > 0.5
    # The less noise, the more it costs.
    assert items["column means"].epsilon_added > items["column <norms>"].epsilon_added


def test_epochs_cost_what_a_shorter_run_would_have_cost(run):
    report = build(run)
    plan = Plan.from_dict(json.loads((run / "plan.json").read_text())["plan"])
    whole = FullBatch(dataset_size=100)
    before = [(Mechanism(noise_multiplier=s, sampling=whole), 1) for s in STATISTICS.values()]
    epochs = report.training.epochs
    assert [each.step for each in epochs] == [5, 10, 15, 20, 24]
    for each in epochs:
        shorter = epsilon([*before, (plan.mechanism, each.step)], plan.delta)
        assert each.epsilon == pytest.approx(shorter, rel=1e-9)
    assert epochs[-1].epsilon == report.claim.epsilon


def test_the_front_holds_what_nothing_beats(run):
    training = build(run).training
    assert training.utility == "validation_accuracy"
    for each in training.epochs:
        beaten = any(
            other.epsilon < each.epsilon and other.validation_accuracy >= each.validation_accuracy
            for other in training.epochs
        )
        assert each.on_front == (not beaten)
    assert training.epochs[0].on_front


def test_layers_show_bounds_noise_and_certificates(run):
    report = build(run)
    plan = Plan.from_dict(json.loads((run / "plan.json").read_text())["plan"])
    layers = report.foundations.layers
    assert [layer.name for layer in layers] == [p.name for p in plan.parameters]
    assert sum(layer.share for layer in layers) == pytest.approx(1.0)
    for layer in layers:
        assert layer.sensitivity == plan.sensitivities[layer.name]
        assert layer.noise_deviation == plan.noise_deviations[layer.name]
        assert layer.certificate.holds
        assert layer.certificate.bound <= layer.certificate.radius * (1 + 1e-6)
    assert report.foundations.certified_at_step == STEPS


def test_evidence_is_found_whatever_it_is_filed_under(run):
    report = build(run)
    assert [len(report.robustness[key]) for key in ("certified", "attacks")] == [1, 1]
    assert [len(report.audit[key]) for key in ("epsilon", "membership", "bounds")] == [1, 1, 1]
    data = json.loads((run / "robustness.json").read_text())
    (run / "robustness.json").write_text(json.dumps(data["certified"]))  # the result itself
    audit = json.loads((run / "audit.json").read_text())
    (run / "audit.json").write_text(json.dumps({"results": [{"a": v} for v in audit.values()]}))
    again = build(run)
    assert again.robustness["certified"][0]["accuracies"] == data["certified"]["accuracies"]
    assert [len(again.audit[key]) for key in ("epsilon", "membership", "bounds")] == [1, 1, 1]
    assert not again.problems


def test_a_bare_run_says_what_is_missing_and_what_adds_it(bare):
    report = build(bare)
    assert report.sound
    missing = {each.file: each.how for each in report.missing}
    assert set(missing) == {
        "bounds.json", "signal.jsonl", "tightness.jsonl", "robustness.json", "audit.json",
        "config.json", "environment.json",
    }  # fmt: skip
    assert "clipless certify" in missing["robustness.json"]
    assert "clipless audit" in missing["audit.json"]
    assert "SignalCallback" in missing["signal.jsonl"]
    assert report.signal is report.tightness is report.robustness is report.audit is None
    assert report.environment["torch"]  # by the plan, which the trainer writes
    assert report.training is not None


def test_a_run_with_an_insecure_seed_states_no_epsilon(tmp_path, bare):
    trainer(tmp_path, insecure_seed=3).fit(DATA)
    for gone in ("nothing", "checkpoints"):  # the ledger says so, and needs no checkpoint for it
        if gone == "checkpoints":
            shutil.rmtree(tmp_path / "checkpoints")
        found = build(tmp_path).claim
        assert (found.standing, found.epsilon) == ("none", None)
        assert "not private" in found.headline
        assert "insecure_seed" in " ".join(found.caveats)
    fresh = build(bare).claim
    assert fresh.standing == "stated"
    assert "seed" not in " ".join([*fresh.not_protected, *fresh.caveats])


def test_json_holds_everything_and_is_plain(run, tmp_path):
    report = build(run)
    report.write_json(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == report.to_dict()
    assert "NaN" not in text
    assert "Infinity" not in text
    report.write_json(tmp_path / "b.json", private=True)
    assert json.loads((tmp_path / "b.json").read_text()) == report.to_dict(private=True)
    both = {*report.to_dict(), *report.to_dict(private=True)}
    for name in RunReport.__dataclass_fields__:
        assert name in both


def test_every_part_is_on_the_page_that_says_why(run):
    report = build(run)
    public, private = report.to_dict(), report.to_dict(private=True)
    shared = {"format", "version", "sound", "checks", "missing", "problems"}
    assert set(public) - shared == set(PUBLIC_PARTS)
    assert set(private) - shared == set(PRIVATE_PARTS)
    assert {*public} & {*private} - shared == {"run", "written", "claim", "configuration"}


def test_write_report_leaves_both_pages(run):
    report = write_report(run)
    assert json.loads((run / "report.json").read_text()) == report.to_dict()
    private = json.loads((run / "report-private.json").read_text())
    assert private == report.to_dict(private=True)
    for name in ("report.html", "report-private.html"):
        assert (run / name).stat().st_size > 10_000
    for ending in ("html", "json"):
        assert (run / f"report-private.{ending}").stat().st_mode & 0o077 == 0
    assert build(run).claim == report.claim  # its own files change nothing


def test_a_report_is_frozen(bare):
    report = build(bare)
    with pytest.raises(AttributeError):
        report.claim.epsilon = 0.1


def test_a_run_without_noise_claims_nothing(tmp_path):
    from tests.report.conftest import train

    train(tmp_path / "loud", callbacks=False, statistics=False, noise_multiplier=0.0)
    report = build(tmp_path / "loud")
    assert report.claim.standing == "none"
    assert report.claim.epsilon is None
    assert not report.sound
    assert math.isinf(report.spending.epsilon)
    report.write_html(tmp_path / "page.html")
    assert "There is no guarantee" in (tmp_path / "page.html").read_text()
