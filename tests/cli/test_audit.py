"""`clipless audit`: attacks on a run, which find nothing unless something is wrong."""

import json

import pytest
import torch

from clipless.cli.commands._audit import draw_rows
from tests.cli.shell import here, refused, shell


def test_a_correct_run_is_not_exposed(run, tmp_path):
    flags = ("--attack-steps", "5", "--canaries", "60", "--canary-steps", "10", "--json")
    outcome = shell("audit", run, *flags, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    said = outcome.json
    assert said["exposed"] == []
    membership = said["membership"]
    assert (membership["members"], membership["non_members"]) == (1434, 363)
    assert all(each["advantage"]["low"] < 0.2 for each in membership["attacks"])
    assert 0.9 < membership["advantage_limit"] < 1
    assert all(0.3 < ratio <= 1 + 1e-6 for ratio in said["bounds"]["ratios"].values())
    canaries = said["canaries"]
    assert canaries["canaries"] == 60
    assert canaries["lower_bound"] <= canaries["claimed_epsilon"] <= 3.0
    assert canaries["exposed"] is False
    kept = json.loads((run / "audit.json").read_text())
    assert kept["format"] == "clipless-audit"
    assert kept["canaries"] == canaries


def test_for_people(run):
    outcome = here("audit", run, "--examples", "100", "--no-bounds")
    assert outcome.code == 0, outcome.err
    assert "Membership inference" in outcome.out
    assert "100 members, 100 others" in outcome.out
    assert "bounds" not in json.loads((run / "audit.json").read_text())


def test_a_wrong_bound_is_exit_code_1(run, monkeypatch):
    """The same attack against bounds of half the size."""
    from clipless import audit

    right = audit.attack_bounds

    def against_half(model, **options):
        from clipless import sensitivity

        shape, loss = options["input_shape"], options["loss"]
        bounds = sensitivity(model, loss=loss, input_shape=shape).gradient_bounds
        half = {name: bound / 2 for name, bound in bounds.items()}
        return right(model, bounds=half, **options)

    monkeypatch.setattr(audit, "attack_bounds", against_half)
    outcome = here("audit", run, "--examples", "50", "--attack-steps", "10", "--json")
    assert outcome.code == 1
    assert len(outcome.json["exposed"]) >= 1
    assert "times its bound" in outcome.err
    assert json.loads((run / "audit.json").read_text())["exposed"] == outcome.json["exposed"]


def test_examples_are_drawn_at_random():
    """The first rows of a file may be of one kind, on which a model does well or badly."""
    rows = (torch.arange(1000.0)[:, None], torch.arange(1000))
    x, y = draw_rows(rows, 100, seed=0)
    assert torch.equal(x[:, 0].long(), y)
    assert len(y.unique()) == 100
    assert y.max() > 800
    assert 300 < y.float().mean() < 700
    assert len(draw_rows(rows, 5000, seed=0)[1]) == 1000


def test_training_without_noise_is_exit_code_1(tmp_path, monkeypatch):
    """Canaries find a trainer that claims epsilon 0.5 and adds no noise."""
    from clipless.training import Trainer

    run = tmp_path / "run"
    flags = ("--data", "digits", "--epsilon", "0.5", "--steps", "60", "--batch-size", "200")
    flags += ("--set", "hidden=32", "--set", "training.validate=false", "--no-report")
    flags += ("--set", "training.check_bounds=0", "--out", run)
    assert here("train", *flags).code == 0

    right = Trainer._make_private

    def without_noise(self, *given):
        loader = right(self, *given)
        session = self.engine.session
        vars(session.plan)["releases"] = [
            query._replace(deviation=query.deviation / 1e6) for query in session.plan.releases
        ]
        return loader

    monkeypatch.setattr(Trainer, "_make_private", without_noise)
    outcome = here("audit", run, "--no-bounds", "--canaries", "64", "--json")
    assert outcome.json["canaries"]["lower_bound"] > outcome.json["canaries"]["claimed_epsilon"]
    assert outcome.code == 1
    assert "canaries contradict" in outcome.err


def test_replay(run):
    flags = ("--examples", "50", "--no-bounds", "--replay", "3", "--replay-steps", "2")
    outcome = here("audit", run, *flags, "--json")
    assert outcome.code == 0, outcome.err
    replays = outcome.json["replay"]
    assert len(replays) == 9
    assert {"record 0 emptied", "record 255 emptied"} < set(replays)
    assert all(each["passed"] and each["releases"] for each in replays.values())
    moved = [max(each["ratios"].values()) for each in replays.values()]
    assert 0.1 < max(moved) <= 1
    shorter = here("audit", run, "--examples", "50", "--no-bounds", "--replay", "1")
    assert "largest move" in shorter.out


def test_a_sensitivity_that_is_understated_is_exit_code_1(run, monkeypatch):
    from clipless.privacy import Plan

    right = Plan.releases.func
    smaller = property(
        lambda plan: [q._replace(sensitivity=q.sensitivity / 50) for q in right(plan)]
    )
    monkeypatch.setattr(Plan, "releases", smaller)
    flags = ("--examples", "50", "--no-bounds", "--replay", "1", "--replay-steps", "40", "--json")
    outcome = here("audit", run, *flags)
    assert outcome.code == 1, outcome.err
    assert "times what is declared" in outcome.err
    assert "record 0 emptied" in outcome.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--confidence", "2"), ("--confidence",)),
        (("--examples", "3"), ("--examples",)),
        (("--canaries", "1"), ("--canaries",)),
        (("--replay", "0"), ("--replay",)),
    ],
)
def test_bad_input(run, flags, words):
    assert refused(here("audit", run, *flags), 2, *words)


def test_no_run(tmp_path):
    assert refused(shell("audit", tmp_path, "--json", cwd=tmp_path), 5, "config.json")
