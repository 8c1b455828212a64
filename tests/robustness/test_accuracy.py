"""Certified accuracy: counts, curve, table, plain data."""

import json

import torch

from clipless.robustness import certified_accuracy, certified_radius
from tests.robustness.networks import binary, inputs, mlp, trained


def example():
    x = inputs((6,), 2.0, count=101)
    model = trained(mlp(), x)
    y = model(x).argmax(1)
    y[:30] = (y[:30] + 1) % 4
    return model, x, y


def test_counts_what_is_right_and_stays_right():
    model, x, y = example()
    radii = certified_radius(model, x)
    right = model(x).argmax(1) == y
    wanted = (0.0, 0.05, 0.2, 1.0)
    result = certified_accuracy(model, x, y, radii=wanted)
    expected = [((radii >= r) & right).float().mean().item() for r in wanted]
    torch.testing.assert_close(torch.tensor(result.accuracies), torch.tensor(expected))
    assert result.clean_accuracy == result.accuracies[0] == 71 / 101
    assert result.examples == 101
    assert result.median_radius == radii[right].median()


def test_curve_falls_from_accuracy_to_zero():
    model, x, y = example()
    result = certified_accuracy(model, x, y, curve_points=57)
    assert len(result.curve_radii) == len(result.curve_accuracies) == 57
    assert result.curve_radii[0] == 0
    assert result.curve_accuracies[0] == result.clean_accuracy
    assert result.curve_accuracies[-1] == 0
    assert sorted(result.curve_accuracies, reverse=True) == list(result.curve_accuracies)


def test_batches_change_nothing():
    model, x, y = example()
    whole = certified_accuracy(model, x, y)
    assert certified_accuracy(model, x, y, batch_size=7).accuracies == whole.accuracies
    for dtype in (torch.float64, torch.float32):
        radii = certified_radius(model, x, arithmetic=dtype)
        part = certified_radius(model, x[50:], arithmetic=dtype, batch_size=7)
        torch.testing.assert_close(part, radii[50:], rtol=1e-9, atol=1e-12)


def test_plain_data_and_table():
    model, x, y = example()
    result = certified_accuracy(model, x, y)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["radii"] == [k / 255 for k in (0, 1, 2, 4, 8, 16)]
    assert data["accuracies"] == list(result.accuracies)
    text = str(result)
    assert "Certified accuracy" in text
    assert f"{result.accuracies[3]:.2%}" in text
    assert f"{result.lipschitz:.4g}-Lipschitz" in text


def test_binary():
    x = inputs((6,), 1.0, count=40)
    model = binary().eval()
    y = (model(x) > 0).long()
    assert certified_accuracy(model, x, y).clean_accuracy == 1.0
    assert certified_accuracy(model, x, 1 - y).clean_accuracy == 0.0
