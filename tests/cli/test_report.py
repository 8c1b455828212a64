"""`clipless report`: the page, again and with what is new; and what speaks against a run."""

import json

from tests.cli.shell import here, refused, shell


def test_the_page_is_built_again(run, tmp_path):
    here("certify", run, "--examples", "20")
    (run / "report.html").unlink()
    outcome = shell("report", run, "--json", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    said = outcome.json
    assert said["sound"] is True
    assert 2.9 < said["epsilon"] <= 3.0
    assert said["failed_checks"] == []
    assert "<html" in (run / "report.html").read_text()
    assert said["html"].endswith("report.html")
    assert said["private_html"].endswith("report-private.html")
    report = json.loads((run / "report-private.json").read_text())
    assert report["robustness"]["certified"][0]["examples"] == 20
    assert "robustness" not in json.loads((run / "report.json").read_text())


def test_the_public_page_is_named_unless_the_private_one_is_asked_for(run):
    assert here("report", run).out.splitlines()[-1].endswith("report.html")
    assert "report-private" not in here("report", run).out
    asked = here("report", run, "--private").out.splitlines()[-1]
    assert asked.endswith("report-private.html")
    assert "not to be published" in asked


def test_a_deployment_record_is_made_from_the_ledger(run):
    said = here("report", run, "--record", "--json").json
    assert said["record"].endswith("deployment.json")
    record = json.loads((run / "deployment.json").read_text())
    assert record["guarantee"]["epsilon"] == said["epsilon"]
    assert record["guarantee"]["delta"] == said["delta"]
    assert record["neighbours"]["relation"] == "zero_out"
    assert (
        record["privacy_unit"]["units"]
        == json.loads((run / "plan.json").read_text())["plan"]["sampling"]["dataset_size"]
    )
    assert sum(each["count"] for each in record["mechanism"]["composition"]) == 30
    assert 0.5 < record["guarantee"]["attack_accuracy_by_base_rate"]["0.5"] < 1
    assert record["hazards"]
    assert record["open_questions"]
    entry = record["registry"]["deployment"]
    # The blocks of an entry of OpenDP's deployments registry, in its order.
    assert list(entry) == [
        "product", "dp_flavor", "privacy_loss", "model", "accounting", "implementation"
    ]  # fmt: skip
    assert entry["privacy_loss"]["privacy_parameters"] == {
        "epsilon": said["epsilon"], "delta": said["delta"]
    }  # fmt: skip
    assert entry["product"]["intended_use"] is None  # what no ledger knows
    answers = {each["question"]: each["answer"] for each in record["nist_sp_800_226"]}
    assert str(said["epsilon"]) in answers["Which definition is met, with which parameters?"]
    covered = answers["Is the arithmetic of the machine part of the guarantee?"]
    assert covered.startswith("in part; ")  # this run's batches are sampled
    assert all(each in covered for each in record["arithmetic"]["not_covered"])
    assert [each["layer"] for each in record["nist_sp_800_226"]][-1] == "data collection"
    assert None in answers.values()
    before = (run / "deployment.json").read_text()
    for private in ("tightness.jsonl", "audit.json", "data.json"):  # nothing comes from these
        (run / private).unlink(missing_ok=True)
    here("report", run, "--record")
    after = json.loads((run / "deployment.json").read_text())
    assert {**after, "written": record["written"]} == json.loads(before)


def test_a_ledger_that_lost_lines_is_exit_code_1(run):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:3] + lines[4:]))
    outcome = here("report", run, "--json")
    assert outcome.code == 1
    assert outcome.json["sound"] is False
    assert outcome.json["failed_checks"]
    assert "something wrong" in outcome.err


def test_no_run(tmp_path):
    assert refused(shell("report", tmp_path / "none", cwd=tmp_path), 5, "none")
    assert refused(here("report", tmp_path), 5, "plan.json")
