"""Exported models are plain torch, compute the same, and run where this library is missing."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from clipless import nn as lip

LAYERS = {
    "SpectralLinear": (lambda: lip.SpectralLinear(8, 4, bias=True), (8,)),
    "SpectralLinear on positions": (lambda: lip.SpectralLinear(8, 4), (3, 8)),
    "FrobeniusLinear": (lambda: lip.FrobeniusLinear(8, 4), (8,)),
    "conv": (lambda: lip.SpectralConv2d(8, 4, 3, bias=True), (8, 6, 6)),
    "conv same": (lambda: lip.SpectralConv2d(8, 4, 3, padding="same"), (8, 6, 6)),
    "conv even": (lambda: lip.SpectralConv2d(8, 4, (2, 4), padding="same"), (8, 6, 6)),
    "conv strided": (
        lambda: lip.SpectralConv2d(8, 4, 3, stride=2, padding=(1, 0), dilation=2, groups=4),
        (8, 6, 6),
    ),
    "conv circular": (
        lambda: lip.SpectralConv2d(8, 4, 3, padding="same", padding_mode="circular"),
        (8, 6, 6),
    ),
    "conv circular even": (
        lambda: lip.SpectralConv2d(8, 4, (2, 3), padding="same", padding_mode="circular"),
        (8, 6, 6),
    ),
    "conv certified": (lambda: lip.SpectralConv2d(8, 4, 3, certificate_size=6), (8, 6, 6)),
    "conv1d": (lambda: lip.SpectralConv1d(8, 4, 3, padding="same", bias=True), (8, 6)),
    "conv1d even": (lambda: lip.SpectralConv1d(8, 4, 4, padding="same"), (8, 6)),
    "conv1d circular even": (
        lambda: lip.SpectralConv1d(8, 4, 4, padding="same", padding_mode="circular"),
        (8, 6),
    ),
    "GroupSort2": (lambda: lip.GroupSort(2), (8, 3)),
    "GroupSort4": (lambda: lip.GroupSort(4, dim=-2), (8, 3)),
    "MaxMin": (lambda: lip.MaxMin(), (8,)),
    "FullSort": (lambda: lip.FullSort(), (8,)),
    "Householder": (lambda: lip.Householder(8), (8, 3)),
    "Absolute": (lambda: lip.Absolute(), (8,)),
    "avg1": (lambda: lip.ScaledAvgPool1d(2), (8, 6)),
    "avg2": (lambda: lip.ScaledAvgPool2d(3, 1, 1), (8, 6, 6)),
    "l2 1": (lambda: lip.ScaledL2NormPool1d(2), (8, 6)),
    "l2 2": (lambda: lip.ScaledL2NormPool2d(2), (8, 6, 6)),
    "global avg": (lambda: lip.ScaledGlobalAvgPool2d(), (8, 6, 6)),
    "global avg 1": (lambda: lip.ScaledGlobalAvgPool1d(), (8, 6)),
    "global l2": (lambda: lip.ScaledGlobalL2NormPool2d(), (8, 6, 6)),
    "global l2 1": (lambda: lip.ScaledGlobalL2NormPool1d(), (8, 6)),
    "LayerCentering": (lambda: lip.LayerCentering(), (8, 3)),
    "LayerCentering axis": (lambda: lip.LayerCentering(-1), (8, 3)),
    "BallProjection": (lambda: lip.BallProjection(0.5), (8, 3)),
    "BoundedInput clip": (lambda: lip.BoundedInput(0.5), (8, 3)),
    "BoundedInput sphere": (lambda: lip.BoundedInput(0.5, "sphere"), (8, 3)),
    "ClipGradient": (lambda: lip.ClipGradient(0.5), (8, 3)),
    "Residual": (lambda: lip.Residual(lip.SpectralLinear(8, 8)), (8,)),
    "Residual add": (lambda: lip.Residual(lip.GroupSort(2), "add"), (8,)),
    "nested": (
        lambda: lip.Residual(
            nn.Sequential(lip.Residual(lip.SpectralLinear(8, 8, bias=True)), lip.MaxMin())
        ),
        (8,),
    ),
}


def randomise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    lip.project(model)
    return model


def classifier():
    return nn.Sequential(
        lip.BoundedInput(5.0),
        lip.SpectralConv2d(1, 4, 3, padding="same", bias=True),
        lip.GroupSort(2),
        lip.Residual(
            nn.Sequential(lip.SpectralConv2d(4, 4, 2, padding="same"), lip.Householder(4))
        ),
        lip.ScaledL2NormPool2d(2),
        lip.LayerCentering(),
        nn.Flatten(),
        lip.BallProjection(2.0),
        lip.SpectralLinear(4 * 9, 5),
        lip.ClipGradient(1.0),
    )


def foreign_parts(module):
    """Everything in a module that belongs to this library."""
    return [
        path or "the model"
        for path, part in module.named_modules(remove_duplicate=False)
        if type(part).__module__.startswith("clipless") or isinstance(part, lip.ConstrainedModule)
    ]


@pytest.mark.parametrize("name", list(LAYERS))
def test_every_layer_computes_the_same(name):
    build, shape = LAYERS[name]
    layer = randomise(build())
    exported = lip.to_torch(layer)
    assert not foreign_parts(exported)
    x = torch.randn(5, *shape)
    torch.testing.assert_close(exported(x), layer(x), rtol=1e-6, atol=1e-7)
    for batch in (1, 7):  # nothing of the example batch was baked in
        x = torch.randn(batch, *shape)
        torch.testing.assert_close(exported(x), layer(x), rtol=1e-6, atol=1e-7)


def test_the_equivalents_are_the_plain_ones():
    kinds = {
        "SpectralLinear": nn.Linear,
        "FrobeniusLinear": nn.Linear,
        "conv": nn.Conv2d,
        "conv1d": nn.Conv1d,
        "conv circular": nn.Conv2d,
    }
    for name, kind in kinds.items():
        assert type(lip.to_torch(LAYERS[name][0]())) is kind
    assert type(lip.to_torch(lip.Embedding(3, 2))) is nn.Embedding


def test_the_original_is_untouched():
    model = randomise(classifier())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    exported = lip.to_torch(model)
    with torch.no_grad():
        for parameter in exported.parameters():
            parameter.zero_()
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class TwoPaths(nn.Module):
    """A user's own module: its code is kept, its children are exported."""

    def __init__(self):
        super().__init__()
        self.first = lip.SpectralLinear(4, 4)
        self.second = nn.ModuleList([lip.SpectralLinear(4, 4), lip.MaxMin()])
        self.other = self.first

    def forward(self, x):
        x = self.first(x)
        for layer in self.second:
            x = x + layer(x)
        return self.other(x)


def test_user_modules_keep_their_code():
    model = randomise(TwoPaths())
    exported = lip.to_torch(model)
    assert type(exported) is TwoPaths
    x = torch.randn(3, 4)
    torch.testing.assert_close(exported(x), model(x))


def test_a_layer_with_two_names_is_exported_under_both():
    exported = lip.to_torch(TwoPaths())
    assert not foreign_parts(exported)
    assert exported.other is exported.first


def test_a_layer_repeated_in_a_sequence_is_exported_everywhere():
    activation = lip.GroupSort(2)
    shared = lip.SpectralLinear(4, 4)
    model = nn.Sequential(shared, activation, shared, activation)
    exported = lip.to_torch(model)
    assert not foreign_parts(exported)
    assert exported[0] is exported[2]
    x = torch.randn(3, 4)
    torch.testing.assert_close(exported(x), model(x))


def test_training_modes_are_kept_part_by_part():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), lip.MaxMin()))
    model.train()
    model[1][0].eval()
    exported = lip.to_torch(model)
    assert exported.training
    assert exported[0].training
    assert not exported[1][0].training


def test_double_precision_is_kept():
    model = randomise(classifier().double())
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(lip.to_torch(model)(x), model(x), rtol=1e-12, atol=1e-12)


def test_exported_models_train_script_and_export():
    exported = lip.to_torch(randomise(classifier()))
    x = torch.randn(2, 1, 6, 6)
    exported(x).sum().backward()
    assert all(p.grad is not None for p in exported.parameters())
    expected = exported(x).detach()
    torch.testing.assert_close(torch.jit.trace(exported, x)(x).detach(), expected)
    program = torch.export.export(exported, (x,))
    torch.testing.assert_close(program.module()(x).detach(), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in LAYERS if "nested" not in name])
def test_exported_layers_can_be_scripted(name):
    build, shape = LAYERS[name]
    exported = lip.to_torch(build())
    x = torch.randn(2, *shape)
    torch.testing.assert_close(torch.jit.script(exported)(x), exported(x))


LOADER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "clipless":
            raise ImportError("clipless is not installed here")

sys.meta_path.insert(0, Blocked())
import torch

for name, model, x, expected in torch.load(sys.argv[1], weights_only=False):
    torch.testing.assert_close(model(x), expected)
    print(name)
assert not any(module.split(".")[0] == "clipless" for module in sys.modules)
"""


def test_saved_models_run_without_this_library(tmp_path):
    """Save, then load and run in a process in which importing this library fails."""
    cases = []
    for name, (build, shape) in LAYERS.items():
        layer = randomise(build())
        x = torch.randn(2, *shape)
        cases.append((name, lip.to_torch(layer), x, layer(x).detach()))
    model, x = randomise(classifier()), torch.randn(2, 1, 6, 6)
    cases.append(("classifier", lip.to_torch(model), x, model(x).detach()))
    path = tmp_path / "exported.pt"
    torch.save(cases, path)
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(path)],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [name for name, *_ in cases]


def test_a_loaded_export_equals_the_saved_one():
    buffer = io.BytesIO()
    exported = lip.to_torch(randomise(classifier()))
    torch.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.randn(2, 1, 6, 6)
    assert torch.equal(loaded(x), exported(x))
    assert list(loaded.state_dict()) == list(exported.state_dict())
