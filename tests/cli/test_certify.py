"""`clipless certify`: certified accuracy of a run, and an attack that says if it is wrong."""

import json

import pytest

from tests.cli.shell import here, refused, shell


def test_certified_accuracy_and_attack(run, tmp_path):
    flags = ("--attack", "--examples", "40", "--restarts", "1", "--attack-steps", "10", "--json")
    outcome = shell("certify", run, *flags, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    found = outcome.json["certified_accuracy"]
    assert found["radii"] == [k / 255 for k in (0, 1, 2, 4, 8, 16)]
    assert found["accuracies"] == sorted(found["accuracies"], reverse=True)
    assert found["accuracies"][0] == found["clean_accuracy"] > 0.5
    assert found["unit"] == "pixels from 0 to 1"
    assert outcome.json["attack"]["broken"] == []
    assert outcome.json["attack"]["attacked"] == 40
    kept = json.loads((run / "robustness.json").read_text())
    assert kept.pop("format") == "clipless-robustness"
    assert kept.pop("version") == 1
    assert kept == outcome.json


def test_radii_and_scale(run):
    flags = ("--radii", "0,0.5", "--scale", "2", "--examples", "50")
    said = here("certify", run, *flags, "--json").json["certified_accuracy"]
    assert said["radii"] == [0.0, 1.0]
    assert said["examples"] == 50
    assert (
        "Radii are Euclidean, in units of pixels from 0 to 1." in here("certify", run, *flags).out
    )


def test_a_broken_certificate_is_exit_code_1(run, monkeypatch):
    """Radii ten times too large: the attack finds it, and the command says so."""
    from clipless.robustness import _certifier

    right = _certifier.Certifier._radius
    monkeypatch.setattr(
        _certifier.Certifier, "_radius", lambda *given: 10 * right(*given), raising=True
    )
    outcome = here("certify", run, "--attack", "--examples", "20", "--restarts", "1", "--json")
    assert outcome.code == 1
    assert outcome.json["attack"]["broken"]
    assert "certificates were broken" in outcome.err


def test_bad_input(run, tmp_path):
    assert refused(shell("certify", tmp_path / "nowhere", cwd=tmp_path), 5, "nowhere")
    assert refused(here("certify", run, "--radii", "0,far"), 2, "--radii")
    assert refused(here("certify", run, "--radii", "-1"), 2, "--radii")
    assert refused(here("certify", run, "--examples", "0"), 2, "--examples")
    assert refused(here("certify", run, "--method", "guess"), 2, "guess")


def test_a_changed_run_is_refused(run):
    """Weights, configuration, plan and data that are not those of the run."""
    weights = bytearray((run / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (run / "model.safetensors").write_bytes(weights)
    assert refused(here("certify", run), 5, "changed after training")


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("config.json", '"product_clip": 0.3', '"product_clip": 0.2', ("other bounds",)),
        ("config.json", '"tau": 10.0', '"tau": "ten"', ("config.json", "damaged")),
        ("config.json", '"split_seed": 0', '"split_seed": 1', ("train data are not those",)),
        ("plan.json", '"gradient_bound": 0.', '"gradient_bound": 1.', ("other bounds",)),
        ("plan.json", "{", "", ("plan.json", "cannot be read")),
        ("result.json", '"format"', '"form"', ("result.json", "damaged")),
        ("data.json", '"size": 1434', '"size": 1433', ("train data", "1433 examples", "1434")),
    ],
)
def test_a_damaged_run_is_refused(run, name, before, after, words):
    text = (run / name).read_text()
    assert before in text
    (run / name).write_text(text.replace(before, after, 1))
    assert refused(here("certify", run, "--examples", "10"), 5, *words)
