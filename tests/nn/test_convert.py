import torch
from torch import nn

from clipless import convert, losses, sensitivity
from clipless import nn as lip


def test_a_cnn_has_a_twin_with_a_proof():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(2),
        nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.GELU()), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    twin = convert(plain, input_norm=5.0)
    assert not twin.obstacles
    assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())
    report = sensitivity(twin.model, loss=losses.CrossEntropy(), input_shape=(3, 16, 16))
    assert report.lipschitz <= 1.001  # the floor is 1
    assert twin.model(torch.randn(2, 3, 16, 16)).shape == plain(torch.randn(2, 3, 16, 16)).shape
    assert [line.split(":")[0] for line in twin.changes] == [
        "before the model", "0", "1", "2", "3", "4.0", "4.1", "5", "7",
    ]  # fmt: skip


def test_what_has_no_twin_is_listed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    plain = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), Scaled(), nn.Bilinear(2, 2, 2)
    )
    twin = convert(plain, input_norm=1.0)
    assert [each.split(":")[0] for each in twin.obstacles] == [
        "1 (BatchNorm1d)", "2 (LayerNorm)", "3 (Scaled)", "4 (Bilinear)",
    ]  # fmt: skip
    assert isinstance(twin.model[1][0], lip.SpectralLinear)
    shared = nn.Linear(4, 4)
    tied = convert(nn.Sequential(shared, nn.ReLU(), shared), input_norm=1.0).model[1]
    assert tied[0] is tied[2]
