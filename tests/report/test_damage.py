"""Files that are missing, damaged, of another run, or being written: never a wrong epsilon."""

import json
import random

import pytest

from clipless.errors import LedgerError
from clipless.privacy import Ledger
from clipless.report import ReportError, build, write_report
from clipless.report._pages import PUBLIC_FILES
from tests.damage import damaged


def failed(report):
    return {check.name: check.detail for check in report.checks if check.state == "failed"}


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_not_a_folder(tmp_path):
    with pytest.raises(ReportError, match="not a folder"):
        build(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"no plan\.json"):
        build(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": "other", "version": 1}',
     '{"format": "clipless-run", "version": 2, "plan": {}}',
     '{"format": "clipless-run", "version": 1, "plan": {}}',
     '{"format": "clipless-run", "version": 1, "plan": []}'],
)  # fmt: skip
def test_a_damaged_plan_is_named(bare, text):
    (bare / "plan.json").write_text(text)
    with pytest.raises(ReportError, match=r"plan\.json"):
        build(bare)


def test_an_edited_ledger_gives_no_epsilon(bare):
    path = bare / "ledger.jsonl"
    text = path.read_text()
    edited = text.replace('"count": 4', '"count": 1', 1)
    assert edited != text
    path.write_text(edited)
    report = write_report(bare)
    assert report.claim.standing == "void"
    assert report.claim.epsilon is None
    assert report.spending is None
    assert "damaged or edited" in failed(report)["The ledger is whole"]
    assert all(each.epsilon is None for each in report.training.epochs)
    page = (bare / "report.html").read_text()
    assert 'class="alert"' in page
    assert "No epsilon can be stated" in page
    assert "No guarantee can be stated" in page
    assert str(bare) not in page  # where the folder lies is nobody's business


def test_a_missing_ledger_gives_no_epsilon(bare):
    (bare / "ledger.jsonl").unlink()
    report = write_report(bare)
    assert report.claim.standing == "void"
    assert "cannot read the ledger" in failed(report)["The ledger is whole"]


def test_a_ledger_cut_short_is_noticed(bare):
    """Whole lines off the end leave a valid ledger, which counts too little."""
    path = bare / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    report = build(bare)
    assert report.claim.standing == "void"
    found = failed(report)
    assert "Lines are missing" in found["The ledger counts every step that left a trace"]
    assert "The ledger is the one that the checkpoint was saved with" in found


def test_a_ledger_cut_short_is_noticed_without_checkpoints(bare):
    (bare / "checkpoints").rename(bare / "elsewhere")
    path = bare / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    report = build(bare)
    assert report.claim.standing == "void"
    assert "metrics.jsonl" in failed(report)["The ledger counts every step that left a trace"]


def test_an_unfinished_last_line_is_no_damage(bare):
    with (bare / "ledger.jsonl").open("a") as file:
        file.write('{"line": 99, "kind": "res')
    with (bare / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "ep')
    report = build(bare)
    assert report.sound
    assert not report.problems


def test_the_ledger_of_another_run(bare, run):
    (bare / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes())
    report = build(bare)
    assert report.claim.standing == "void"
    assert "The ledger is the one that the checkpoint was saved with" in failed(report)


def test_a_plan_of_other_data(bare):
    def change(data):
        data["plan"]["sampling"]["dataset_size"] = 1000
        data["plan"]["sampling"]["rate"] = 0.02

    edit(bare / "plan.json", change)
    report = build(bare)
    assert report.claim.standing == "void"
    assert "another run" in failed(report)["Ledger and plan are about the same data"]


def test_a_plan_with_other_noise_than_the_ledger(bare):
    edit(bare / "plan.json", lambda data: data["plan"].update(noise_multiplier=9.0))
    report = write_report(bare)
    assert report.claim.standing == "void"
    assert "9" in failed(report)["The steps are those of the plan"]
    assert all(each.epsilon is None for each in report.training.epochs)
    assert "cannot be trusted" in (bare / "report.html").read_text()


def test_an_exceeded_budget_is_red_but_stated(bare):
    edit(bare / "plan.json", lambda data: data["plan"].update(target_epsilon=0.5))
    report = build(bare)
    assert report.claim.standing == "stated"
    assert report.claim.epsilon > 0.5
    assert not report.sound
    assert "The budget is kept" in failed(report)


def test_noise_that_changed_on_purpose_is_noted(bare):
    """Half of the steps as planned, the others by set_noise_multiplier: their cost is counted."""
    plan = json.loads((bare / "plan.json").read_text())["plan"]
    from clipless.privacy import Plan

    planned = Plan.from_dict(plan)
    before = build(bare).claim.epsilon
    with Ledger(bare / "ledger.jsonl") as ledger:
        from dataclasses import replace

        ledger.spend(replace(planned.mechanism, noise_multiplier=1.0))
    report = build(bare)
    (check,) = [each for each in report.checks if "those of the plan" in each.name]
    assert check.state == "note"
    assert report.claim.standing == "stated"
    assert report.claim.epsilon > before


def test_a_run_that_is_going_on_is_refused(bare):
    with (
        Ledger(bare / "ledger.jsonl"),
        pytest.raises(LedgerError, match=r"being written.*Wait"),
    ):
        build(bare)
    assert build(bare).sound
    assert not list(bare.glob("report.*"))


OPTIONAL = [
    "metrics.jsonl", "signal.jsonl", "tightness.jsonl", "bounds.json", "robustness.json",
    "audit.json", "config.json", "environment.json", "result.json",
]  # fmt: skip


@pytest.mark.parametrize("text", ["{", "[1, 2]\n[3]\n", "\x00\xff binary \n more\n"])
def test_damaged_files_are_named_and_shown(run, text):
    for name in OPTIONAL:
        (run / name).write_text(text)
    report = write_report(run)
    named = {each.file for each in report.problems}
    # A last line that a crash cut short is no damage.
    assert named == {name for name in OPTIONAL if text != "{" or name.endswith(".json")}
    assert report.claim.standing == "stated"
    pages = [(run / f"report{kind}.html").read_text() for kind in ("", "-private")]
    for name in named:
        assert any(f"<strong>{name}</strong>" in page for page in pages)
        assert (f"<strong>{name}</strong>" in pages[0]) == (name in PUBLIC_FILES)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", {"kind": "epoch", "step": 5, "epoch": 1, "loss": "low"}),
        ("metrics.jsonl", {"kind": "epoch"}),
        ("signal.jsonl", {"kind": "signal", "epoch": 1, "step": 5, "steps": 5}),
        ("signal.jsonl", {"kind": "signal", "epoch": 1, "step": 5, "steps": 5, "parameters": [3]}),
        ("tightness.jsonl", {"kind": "tightness", "step": 0, "parameters": []}),
        ("robustness.json", {"radii": [0, 1], "accuracies": [1.0]}),
        ("robustness.json", {"radii": "all", "accuracies": [1.0]}),
        ("robustness.json", {"nothing": "known"}),
        ("audit.json", {"attacks": [{"name": "loss"}]}),
        ("audit.json", {"lower_bound": "large"}),
        ("bounds.json", {"start": {"parameters": "none"}}),
        ("bounds.json", {}),
    ],
)
def test_files_of_another_form_are_named(run, name, line):
    (run / name).write_text(json.dumps(line) + "\n")
    report = write_report(run)
    assert name in {each.file for each in report.problems}
    assert report.claim.standing == "stated"


@pytest.mark.parametrize(
    "name", ["signal.jsonl", "tightness.jsonl", "metrics.jsonl", "robustness.json", "audit.json"]
)
def test_any_part_may_be_damaged(run, name):
    """Pages are written, and what cannot be shown is named: on the page that shows the file."""
    lines = (run / name).read_text().splitlines()
    index = 1 if name.endswith(".jsonl") else 0
    cases = list(damaged(json.loads(lines[index])))
    for case in random.Random(1).sample(cases, min(len(cases), 25)):
        lines[index] = json.dumps(case)
        (run / name).write_text("\n".join(lines) + "\n")
        report = build(run)
        for private in (False, True):
            report.write_html(run / "page.html", private=private)
            text = (run / "page.html").read_text()
            assert "</html>" in text
            if private == (name not in PUBLIC_FILES) and "cannot be shown" in text:
                assert f"<strong>{name}" in text or "Privacy and utility" in text


def test_an_exceeded_bound_voids_the_claim(run):
    path = run / "tightness.jsonl"
    lines = path.read_text().splitlines()
    fields = json.loads(lines[2])
    fields["violations"] = {"1.weight": 1.5}
    fields["parameters"][0]["largest"] = 1.5
    lines[2] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")
    report = build(run)
    assert report.claim.standing == "void"
    assert "1.weight" in failed(report)["No gradient that was looked at exceeds its bound"]


def test_a_weight_outside_its_constraint_voids_the_claim(run):
    def change(data):
        data["end"]["parameters"][0]["certificate"]["bound"] = 1.01

    edit(run / "bounds.json", change)
    report = build(run)
    assert report.claim.standing == "void"
    assert "Every constrained weight is where its bound needs it" in failed(report)


def test_an_audit_that_contradicts_the_claim_is_red(run):
    edit(run / "audit.json", lambda data: data["one_run"].update(lower_bound=3.456))
    report = write_report(run)
    assert not report.sound
    assert "3.456" in failed(report)["No audit contradicts the claim"]
    assert "contradicted" in (run / "report-private.html").read_text()
    public = (run / "report.html").read_text()
    assert "3.456" not in public
    assert "measured on private data speaks against the claim" in public
    assert "Do not rely on the claim" in public


def test_an_audit_without_limit_contradicts_every_claim(run):
    """An infinite lower bound is written as null."""
    edit(run / "audit.json", lambda data: data["one_run"].update(lower_bound=None))
    assert "No audit contradicts the claim" in failed(write_report(run))


def test_another_epsilon_than_training_said(run):
    (run / "result.json").write_text(json.dumps({"epsilon": 0.1}))
    report = build(run)
    assert "0.1" in failed(report)["Training ended with the same epsilon"]
    assert report.claim.epsilon > 0.1
