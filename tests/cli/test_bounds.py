"""`clipless bounds`: of a run, of a model by name, of a model of one's own."""

import json

import pytest

from tests.cli.shell import here, refused, shell

MODELS = """
import torch
from clipless import nn as lip

def good():
    return torch.nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(4, 3))

def mixing():
    layers = lip.BoundedInput(2.0), torch.nn.BatchNorm1d(4), lip.SpectralLinear(4, 3)
    return torch.nn.Sequential(*layers)

def unbounded():
    return torch.nn.Sequential(lip.SpectralLinear(4, 3))

number = 3
text = str
"""


def test_of_a_run_they_are_those_of_the_plan(run, tmp_path):
    outcome = shell("bounds", run, "--json", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    plan = json.loads((run / "plan.json").read_text())["plan"]
    planned = {each["name"]: each["gradient_bound"] for each in plan["parameters"]}
    assert outcome.json["gradient_bounds"] == pytest.approx(planned, rel=1e-12)


def test_of_a_model_by_name():
    flags = ("lenet", "--input-shape", "1,16,16", "--classes", "4", "--set", "hidden=8")
    said = here("bounds", *flags, "--set", "input_norm=2", "--json").json
    # Cross-entropy is sqrt(2)-Lipschitz, the input has norm at most 2, every layer 1.
    assert said["gradient_bounds"]["1.weight"] == pytest.approx(2 * 2**0.5, rel=1e-6)
    said = here("bounds", *flags, "--loss", "0.5", "--set", "input_norm=2", "--json").json
    assert said["gradient_bounds"]["1.weight"] == pytest.approx(1.0, rel=1e-6)
    shown = here("bounds", *flags)
    assert "SpectralConv2d" in shown.out


def test_of_a_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "cli_models.py").write_text(MODELS)
    outcome = shell("bounds", "cli_models:good", "--input-shape", "4", "--json", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.json["gradient_bounds"]["1.weight"] == pytest.approx(2 * 2**0.5, rel=1e-6)
    monkeypatch.chdir(tmp_path)
    shape = ("--input-shape", "4")
    assert refused(here("bounds", "cli_models:mixing", *shape), 6, "BatchNorm1d")
    assert refused(here("bounds", "cli_models:unbounded", *shape), 6, "BoundedInput")
    assert here("bounds", "cli_models:unbounded", *shape, "--input-norm", "1").code == 0
    assert refused(here("bounds", "cli_models:nothing", *shape), 2, "nothing")
    assert refused(here("bounds", "cli_models:number", *shape), 2, "number")
    assert refused(here("bounds", "cli_models:text", *shape), 2, "torch.nn.Module")
    assert refused(here("bounds", "no_such_module:x", *shape), 2, "no_such_module")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("lenett", "--input-shape", "1,8,8", "--classes", "2"), ("lenett", "lenet")),
        (("lenet", "--input-shape", "8", "--classes", "2"), ("input_shape",)),
        (("mlp", "--input-shape", "eight", "--classes", "2"), ("eight",)),
        (("mlp", "--input-shape", "8"), ("--classes",)),
        (("mlp",), ("--input-shape",)),
        (("mlp", "--input-shape", "8", "--classes", "2", "--loss", "mse"), ("mse",)),
    ],
)
def test_bad_input(flags, words):
    assert refused(here("bounds", *flags), 2, *words)


def test_a_run_has_its_own_model(run):
    assert refused(here("bounds", run, "--classes", "3"), 2, "its own")
