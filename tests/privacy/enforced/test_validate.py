import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless import nn as lip
from clipless.cli import main


def broken():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4),
        nn.BatchNorm1d(4), nn.Bilinear(2, 2, 2),
    )  # fmt: skip


def test_all_problems_are_listed_with_their_place_and_fix():
    report = clipless.validate(broken(), torch.zeros(1, 3, 8, 8))
    places = [problem.split(":")[0] for problem in report.problems]
    assert places == ["1 (BatchNorm2d)", "5 (BatchNorm1d)", "6 (Bilinear)"] or places[:2] == [
        "1 (BatchNorm2d)", "5 (BatchNorm1d)",
    ]  # fmt: skip
    assert not report.trainable
    assert {each.by for each in report.parameters} == {"refused"}
    reasons = {each.name: each.reason for each in report.parameters}
    assert reasons["5.weight"].startswith("5 (BatchNorm1d)")
    assert "GroupNorm" in str(report)


def test_parameters_are_trained_by_proof_or_enforcement():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    model.spare = nn.Parameter(torch.zeros(2))
    report = clipless.validate(model, torch.zeros(1, 4))
    assert report.trainable
    by = {each.name: each.by for each in report.parameters}
    assert (by["0.weight"], by["0.bias"], by["1.weight"]) == (
        "enforcement",
        "frozen",
        "enforcement",
    )
    lipschitz = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 2))
    assert clipless.validate(lipschitz, torch.zeros(1, 4)).parameters[0].by == "proof"


def test_bounds_that_explode_are_told_before_training():
    layers = [lip.SpectralLinear(8, 8, norm=10.0) for _ in range(6)]
    model = nn.Sequential(lip.BoundedInput(1.0), *layers, lip.SpectralLinear(8, 2))
    (warning,) = clipless.validate(model, torch.zeros(1, 8)).warnings
    assert "bounds explode" in warning
    assert "SpectralLinear), 10" in warning
    data = TensorDataset(torch.randn(40, 8), torch.zeros(40).long())
    with pytest.warns(UserWarning, match=r"bounds explode.*SpectralLinear\), 10"):
        clipless.PrivacyEngine(insecure_seed=0).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=clipless.losses.CrossEntropy(), noise_multiplier=1.0,
            data_loader=DataLoader(data, batch_size=10),
        )  # fmt: skip


def test_the_command_line_prints_it(capsys):
    target = "tests.privacy.enforced.test_validate:broken"
    with pytest.raises(SystemExit) as end:
        main(["bounds", target, "--input-shape", "3,8,8", "--enforced", "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trainable"] is False
    assert found["problems"][0].startswith("1 (BatchNorm2d)")
