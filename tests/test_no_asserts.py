"""No check of the package disappears under `python -O`."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "clipless"


def asserts(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("folder", sorted(p.name for p in PACKAGE.iterdir() if p.is_dir()))
def test_checks_raise(folder):
    found = {
        f"{folder}/{file.name}": lines
        for file in (PACKAGE / folder).rglob("*.py")
        if (lines := asserts(file))
    }
    assert found == {}


def test_files_beside_the_folders():
    assert {f.name: lines for f in PACKAGE.glob("*.py") if (lines := asserts(f))} == {}


SABOTAGES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import clipless
from clipless import losses
from clipless import nn as lip
from clipless.errors import CliplessError, PrivacyError

if __debug__:
    raise SystemExit("this must run under python -O")


def private(model=None, **options):
    model = model or nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 3))
    data = TensorDataset(torch.rand(40, 4), torch.randint(3, (40,)))
    criterion, optimizer = losses.CrossEntropy(), torch.optim.SGD(model.parameters(), lr=0.1)
    engine = clipless.PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=10),
        criterion=criterion, noise_multiplier=1.0, **options,
    )
    return (engine, *made[:3], criterion)


def refused(name, action, error=PrivacyError):
    try:
        action()
    except error:
        print("refused:", name)
    else:
        raise SystemExit(f"{name} was not refused")


engine, model, optimizer, loader, criterion = private()
x, y = next(iter(loader))
loss = criterion(model(x), y)
loss.backward()
refused("backward twice", lambda: criterion(model(x), y).backward())
optimizer.step()
refused("a step without a batch", optimizer.step)
refused("a batch twice", lambda: criterion(model(x), y).backward())
refused("another loss", lambda: model(next(iter(loader))[0]).sum().backward())


def own_gradient():
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()


refused("a gradient of one's own", own_gradient)
mixing = nn.Sequential(lip.BoundedInput(1.0), nn.BatchNorm1d(4), lip.SpectralLinear(4, 3))
refused("batch statistics", lambda: private(mixing), CliplessError)
engine.close()
refused("a session that is over", lambda: model(x))
assert False, "not looked at under -O"
"""


def test_sabotages_are_refused_under_python_without_asserts(tmp_path):
    script = tmp_path / "sabotages.py"
    script.write_text(SABOTAGES)
    found = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", str(script)],
        capture_output=True, text=True, timeout=120, check=False, cwd=PACKAGE.parent,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("refused:") == 7
