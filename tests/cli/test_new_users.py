"""What people type wrong on their first day: every mistake ends with what to do about it."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from clipless.common import did_you_mean
from tests.cli.shell import here, refused

ROOT = Path(__file__).parents[2]
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)


def written_commands():
    """Every command of `clipless` that documentation or help shows, and whether it is whole."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in [*pages, *sorted((ROOT / "clipless" / "cli" / "commands").glob("*.py"))]:
        text = path.read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?: {4}| {8})(?:torchrun .* -m )?(clipless .*)$", text, re.M):
            yield path.name, line, True
        for part in re.findall(r"`(clipless [^`]+)`", text):
            yield path.name, part, False


def test_every_command_in_the_documentation_is_understood():
    from typer.main import get_command

    from clipless.cli._app import app

    seen = 0
    for page, line, whole in written_commands():
        command, words = get_command(app), shlex.split(line, comments=True)[1:]
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page}: there is no {line}"
            command = command.commands[words.pop(0)]
        if hasattr(command, "commands"):
            assert {*words} <= {"--version", "--help", "--install-completion"}, f"{page}: {line}"
            continue
        try:
            command.make_context(line, words)
            seen += 1
        except Exception as error:
            # Within a sentence, what a command or an option works on may be left out.
            if whole or not re.search("Missing parameter|requires an argument", str(error)):
                pytest.fail(f"{page}: {line}: {error}")
    assert seen >= 60


def test_a_file_may_be_named_without_its_flag(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("age,income\n30,low\n40,high\n")
    flags = ("--epsilon", 1, "--out", tmp_path / "run")
    assert refused(here("train", path, *flags), 2, "--target")  # it was read as a table
    assert refused(here("train", path, "--data", "digits", *flags), 2, "two data sets")


@pytest.mark.parametrize(
    ("flags", "nearest"),
    [
        (("--model", "lent"), "Did you mean 'lenet'?"),
        (("--loss", "crossentropy"), "Did you mean 'cross_entropy'?"),
        (("--recipe", "mnist-epsilon"), "Did you mean 'mnist-epsilon3'?"),
        (("--recipe", "MNIST_epsilon3"), "Did you mean 'mnist-epsilon3'?"),
        (("--set", "training.optimizer=adma"), "Did you mean 'adam'?"),
        (("--set", "hiden=3", "--model", "mlp"), "Did you mean 'hidden'?"),
    ],
)
def test_wrong_names_are_answered_with_the_nearest_right_one(flags, nearest, tmp_path):
    outcome = here("train", "--data", "digits", "--epsilon", 2, "--out", tmp_path / "run", *flags)
    assert refused(outcome, 2, nearest)
    assert not (tmp_path / "run").exists()


def test_far_names_get_no_guess():
    assert did_you_mean("transformer", ["lenet", "vgg"]) == ""


@pytest.mark.parametrize("device", ["cuda:17", "tpu", "qpu:0"])
def test_a_device_that_is_not_there_is_a_usage_error(device, tmp_path):
    outcome = here(
        "train", "--data", "digits", "--epsilon", 2, "--device", device, "--out", tmp_path / "run"
    )
    assert refused(outcome, 2, repr(device), "cannot be used", "cpu")
    assert not (tmp_path / "run").exists()


def test_an_unwritable_out_is_refused_before_data_are_read(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "run"
    # The data do not exist either: the folder is looked at first.
    outcome = here("train", "--data", "nothing.npz", "--epsilon", 2, "--out", place)
    assert refused(outcome, 2, str(place), "is a file")


def test_errors_of_the_file_system_are_usage_errors(tmp_path):
    (tmp_path / "file").write_text("")
    outcome = here("budget", "--epsilon", 3, "--examples", 60000, "--batch-size", 4096,
                   "--steps", 45, "--plot", tmp_path / "file" / "curve.png")  # fmt: skip
    assert refused(outcome, 2, "curve.png", "Not a directory")


def test_hints_name_extras_that_exist():
    sources = [
        *(ROOT / "clipless").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
    ]
    named = {
        extra
        for path in sources
        for group in re.findall(r"clipless\[([a-z,]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert {"cli", "data", "plots", "sklearn", "sweeps"} <= named <= EXTRAS
    bare = [
        path for path in (ROOT / "clipless").rglob("*.py")
        if re.search(r"pip install (?!['\"])(?!\")[a-z]+", path.read_text())
    ]  # fmt: skip
    assert bare == []


def test_estimators_without_scikit_learn_say_what_to_install():
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'sklearn' else find(n, *a)\n"
        "import clipless.sklearn"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "pip install 'clipless[sklearn]'" in done.stderr


def test_doctor_says_what_is_there_and_trains():
    found = here("doctor", "--json").json
    assert set(found["extras"]) <= EXTRAS
    assert found["self_test"]["problem"] is None
    assert found["self_test"]["epsilon"] <= 3.0
    assert found["packages"]["torch"]
    said = here("doctor")
    assert said.code == 0
    assert "Self test: passed" in said.out


def test_doctor_fails_where_training_does(monkeypatch):
    from clipless.training import Trainer

    def broken(self, *data):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Trainer, "fit", broken)
    outcome = here("doctor")
    assert outcome.code == 1
    assert "no memory" in outcome.err
