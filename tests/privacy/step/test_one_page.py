"""The way of a plain private step through the package is short, and its page has all stages."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.privacy.step import _step

_ROOT = str(Path(clipless.__file__).parent)
MOST_FILES = 20
"""The files of the package that one eager step may pass through."""
MORE_FILES = 6
"""Those of a budget and of layers that sort, besides."""
STAGES = [
    "sample", "before_forward", "before_criterion", "backward", "_add_gradients",
    "_account_for_step", "_release", "after_optimizer",
]  # fmt: skip


def readme_loop():
    """The README's: a budget, and a layer that sorts."""
    model = torch.nn.Sequential(
        lip.BoundedInput(norm=3.0), lip.SpectralLinear(8, 16), lip.GroupSort(2),
        lip.SpectralLinear(16, 2),
    )  # fmt: skip
    return model, {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 20}


def plain_loop():
    model = torch.nn.Sequential(lip.BoundedInput(norm=3.0), lip.SpectralLinear(8, 2))
    return model, {"noise_multiplier": 1.0}


def files_of_a_step(loop):
    """The files that execute a function in the twelfth step of a loop."""
    x = torch.randn(512, 8)
    model, budget = loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = losses.CrossEntropy(tau=1.0)
    engine = PrivacyEngine()
    start = engine.make_private_with_epsilon if "epochs" in budget else engine.make_private
    model, optimizer, loader = start(
        module=model, optimizer=optimizer, criterion=criterion,
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=64), **budget,
    )  # fmt: skip
    batches = (batch for _ in range(2) for batch in loader)
    seen = set()

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            seen.add(frame.f_code.co_filename)

    before = sys.getprofile()
    for step in range(12):  # trials are held before steps 0, 1, 2, 4, 8
        if step == 11:
            sys.setprofile(watch)
        try:
            inputs, targets = next(batches)
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
    return seen


@pytest.mark.parametrize(
    ("loop", "most"), [(plain_loop, MOST_FILES), (readme_loop, MOST_FILES + MORE_FILES)]
)
def test_a_step_passes_through_few_files(loop, most):
    seen = files_of_a_step(loop)
    assert str(Path(_step.__file__)) in seen
    assert len(seen) <= most, sorted(seen)


def test_the_page_has_the_stages_in_their_order_with_their_argument():
    lines = [inspect.getsourcelines(getattr(_step.PrivateStep, name))[1] for name in STAGES]
    assert lines == sorted(lines)
    for name in STAGES:
        assert "Privacy:" in inspect.getdoc(getattr(_step.PrivateStep, name)), name


def test_the_page_knows_nothing_of_hooks_compilers_graphs_and_ranks():
    code = inspect.getsource(_step.PrivateStep)
    for word in ("register_", "torch.compile", "cuda", "torch.distributed", "rank"):
        assert word not in code
