"""One trained run, by the command line itself, that all tests of commands share."""

import shutil

import pytest

from clipless.sklearn import _fits
from tests.cli.shell import shell

FLAGS = (
    "--data",
    "digits",
    "--epsilon",
    "3",
    "--steps",
    "30",
    "--batch-size",
    "200",
    "--seed",
    "1",
)


@pytest.fixture(autouse=True)
def first_fit(monkeypatch):
    """Commands run in a process of their own, where no fit came before theirs."""
    monkeypatch.setattr(_fits, "_fits", _fits._Fits())


@pytest.fixture(scope="session")
def first_run(tmp_path_factory):
    """The folder of a run and what `clipless train` said."""
    place = tmp_path_factory.mktemp("cli")
    options = ("--set", "hidden=32", "--product-clip", "0.3", "--out", "runs/first", "--json")
    outcome = shell("train", *FLAGS, *options, cwd=place)
    assert outcome.code == 0, outcome.err
    return place / "runs" / "first", outcome


@pytest.fixture
def run(first_run, tmp_path):
    """A copy of the run, to be changed."""
    return shutil.copytree(first_run[0], tmp_path / "run")
