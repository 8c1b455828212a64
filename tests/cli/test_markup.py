"""Square brackets in names of files, folders, columns and layers are printed as they are."""

import numpy as np
import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.audit import tightness
from clipless.bounds import sensitivity
from clipless.losses import CrossEntropy
from tests.cli.shell import here, refused

ODD = ["[b] of [red]", "close [/b]", "[/]", "smile :smile: [link=x]", "back\\[bold]"]
"""Names that rich takes for markup or emoji, or refuses as broken markup."""


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory):
    """A run whose file, columns, categories, classes and folder have brackets in their names."""
    place = tmp_path_factory.mktemp("odd") / "[b]place [z]"
    place.mkdir()
    random = np.random.default_rng(1)
    x = random.normal(size=(400, 2))
    label = np.where(x[:, 0] > 0, "[/red]", "[no]")
    kind = np.where(x[:, 1] > 0, "[/]", "[bold]")
    rows = [f"{x[k, 0]:.4f},{kind[k]},{label[k]}" for k in range(400)]
    (place / "[b]table.csv").write_text("\n".join(["a[/b],kind[/],[/x]", *rows]) + "\n")
    flags = ("--data", place / "[b]table.csv", "--target", "[/x]", "--epsilon", "4")
    outcome = here("train", *flags, "--set", "steps=5", "--out", place / "run [b]")
    assert outcome.code == 0, outcome.err
    assert "run [b]" in outcome.out
    return place / "run [b]"


def test_commands_on_such_a_run(odd_run):
    for command in (
        ("report", odd_run),
        ("budget", odd_run),
        ("bounds", odd_run),
        ("certify", odd_run, "--examples", "10"),
        ("audit", odd_run, "--no-bounds"),
        ("export", odd_run, "--format", "weights"),
        ("data", "check", odd_run),
    ):
        outcome = here(*command)
        assert outcome.code == 0, outcome.err
    assert "[b]place [z]" in here("report", odd_run).out
    assert "run [b]" in here("certify", odd_run, "--examples", "10").err


def test_errors_show_the_name(tmp_path):
    assert refused(here("report", tmp_path / "a [/b]"), 5, "a [/b]")
    path = tmp_path / "[b]t[x].csv"
    path.write_text("x[/],y\n1,2\n")
    flags = ("train", "--epsilon", "1", "--out", tmp_path / "run", "--data", path)
    assert refused(here(*flags, "--target", "z[/b]"), 3, "z[/b]")


@pytest.mark.parametrize("name", ODD)
def test_layers(name):
    """Whoever prints them, with rich or without."""
    from io import StringIO

    from rich.console import Console

    model = nn.Sequential(lip.BoundedInput(1.0))
    model.add_module(name, lip.SpectralLinear(4, 2))
    data = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    loss = CrossEntropy()
    shown = [
        sensitivity(model, loss=loss, input_shape=(4,)),
        tightness(model, data, loss=loss),
    ]
    for each in shown:
        buffer = StringIO()
        Console(file=buffer, width=200).print(each)
        assert f"{name}.weight" in buffer.getvalue()
        assert name.split()[0] in str(each)
