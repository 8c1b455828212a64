"""`clipless export`: files that run without this library, with the same outputs."""

import importlib.util
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from clipless import to_torch
from clipless.runs import open_run
from tests.cli.shell import environment, here, refused, shell

ALONE = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
x = torch.load(sys.argv[2], weights_only=True)
torch.save(program(x), sys.argv[3])
assert not any(name.split(".")[0] == "clipless" for name in sys.modules)
"""


def test_the_program_runs_without_the_library(run, tmp_path):
    outcome = shell("export", run, "--out", tmp_path / "digits.pt2", "--json", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.json["largest_difference"] < 1e-5
    x = 3 * torch.rand(7, 1, 8, 8)  # another batch size than the export saw
    torch.save(x, tmp_path / "x.pt")
    paths = [tmp_path / name for name in ("digits.pt2", "x.pt", "y.pt")]
    subprocess.run([sys.executable, "-c", ALONE, *paths], check=True, env=environment())
    expected = open_run(run).model(x)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), expected, rtol=0, atol=1e-5)


def test_weights(run):
    outcome = here("export", run, "--format", "weights", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["file"] == str(run / "export.safetensors")
    model = to_torch(open_run(run).model)
    found = safetensors.torch.load_file(run / "export.safetensors")
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_bad_input(run, tmp_path):
    assert refused(shell("export", tmp_path / "none", cwd=tmp_path), 5, "none")
    assert refused(here("export", run, "--out", "model.pickle"), 2, ".pt2")
    assert refused(here("export", run, "--format", "pickle"), 2, "pickle")


@pytest.mark.skipif(importlib.util.find_spec("onnx") is not None, reason="onnx is installed")
def test_onnx_says_what_it_needs(run):
    assert refused(here("export", run, "--format", "onnx"), 7, "pip install 'clipless[onnx]'")
