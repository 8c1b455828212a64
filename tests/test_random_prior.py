"""The prior from random processes: its images, its features, and the private head on them."""

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import _random_images  # noqa: F401
        import random_prior
    finally:
        sys.path.remove(str(EXAMPLES))
    return random_prior


@pytest.fixture(scope="module")
def backbone(example):
    return example.pretrain(seconds=60.0, steps=2, width=1, batch_size=32, seed=3, progress=False)


def test_images_are_random_images(example):
    torch.manual_seed(0)
    first, second = (example.random_images(64) for _ in range(2))
    for images in (first, second, example.views(first)):
        assert images.shape == (64, 3, 32, 32)
        assert images.min() >= 0
        assert images.max() <= 1
        assert images.isfinite().all()
    assert first.flatten(1).std(dim=1).min() > 0.01
    # Nowhere twice the same: neither within a draw nor between two.
    both = torch.cat([first, second]).flatten(1)
    distances = torch.cdist(both, both) + 100 * torch.eye(128)
    assert distances.min() > 0.5
    torch.manual_seed(0)
    assert torch.equal(example.random_images(64), first)


def test_views_show_their_own_image(example):
    """A view is closer in mean colour to its own image than to the others, and is not it."""
    torch.manual_seed(1)
    images = example.random_images(64)
    views = example.views(images)
    assert (views - images).abs().flatten(1).mean(dim=1).min() > 0.005
    means = torch.cdist(views.mean(dim=(2, 3)), images.mean(dim=(2, 3)))
    assert means.diagonal().mean() < 0.6 * means.mean()


def test_pretraining_takes_no_data(example):
    arguments = inspect.signature(example.pretrain).parameters.values()
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in arguments)
    assert {each.name for each in arguments} == {
        "seconds", "steps", "width", "batch_size", "learning_rate", "device", "compile",
        "seed", "progress",
    }  # fmt: skip


def test_the_loss_wants_agreement_and_spread(example):
    z = torch.nn.functional.normalize(torch.randn(32, 8))
    same = z[:1].expand(32, 8)
    good = example.spread_and_agree(z, z)
    assert good < example.spread_and_agree(z, z.roll(1, 0))
    assert good < example.spread_and_agree(same, same)


def test_the_backbone_is_frozen_and_repeatable(example, backbone):
    again = example.pretrain(seconds=60.0, steps=2, width=1, batch_size=32, seed=3, progress=False)
    fresh = example.Backbone(1)
    weights = backbone.stages[2][0].main[0].weight
    assert not backbone.training
    assert not any(each.requires_grad for each in backbone.parameters())
    torch.testing.assert_close(weights, again.stages[2][0].main[0].weight)
    assert (weights - fresh.stages[2][0].main[0].weight).abs().max() > 1e-3


def test_features_are_functions_of_single_images(example, backbone):
    images = torch.rand(20, 3, 32, 32)
    pools = ((3, 1), (2, 2))
    blocks = example.features_of(backbone, images, pools=pools, scattering=True)
    assert [tuple(each.shape) for each in blocks] == [(20, 64, 1), (20, 32, 4), (20, 243, 64)]
    alone = example.features_of(backbone, images[7:8], pools=pools, scattering=True)
    mirrored = example.features_of(backbone, images.flip(-1), pools=pools, scattering=True)
    for block, one, mirror in zip(blocks, alone, mirrored, strict=True):
        torch.testing.assert_close(block[7:8], one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(block, mirror, rtol=1e-4, atol=1e-4)
        assert (block[0] - block[1]).abs().max() > 1e-4


def test_fields_are_repeated_without_changing_averages(example):
    coarse, fine = torch.rand(5, 3, 1), torch.rand(5, 2, 4)
    together = example.common_fields(coarse, fine)
    assert together.shape == (5, 5, 4)
    torch.testing.assert_close(together[:, :3].mean(dim=2), coarse[:, :, 0])
    torch.testing.assert_close(together[:, 3:], fine)


def test_the_head_keeps_its_budget_and_learns(example, monkeypatch):
    """Two classes that one channel of one block tells apart, on features far from standard."""
    torch.manual_seed(5)
    labels = torch.randint(2, (3000,))
    pooled = 40 + 7 * torch.randn(3000, 4, 1)
    pooled[:, 2, 0] += 30 * labels
    spatial = 0.01 * torch.randn(3000, 3, 4)
    queried, original = [], example.fit_channels

    def watched(rows, **options):
        queried.append(rows)
        return original(rows, **options)

    monkeypatch.setattr(example, "fit_channels", watched)
    parts = [
        ([pooled[part], spatial[part]], labels[part])
        for part in (slice(0, 2500), slice(2500, 3000))
    ]
    rows = example.experiment(*parts, dataset="toy", classes=2, epsilons=[4.0], seeds=[0])
    assert len(queried) == 1  # statistics of the private features come from noisy queries
    (row,) = rows
    assert row["recipe"] == "toy-random-prior-epsilon4"
    assert 3.0 < row["epsilon"] <= 4.0
    assert row["delta"] == 1e-5
    assert row["accuracy"] > 0.9


@pytest.mark.slow
def test_the_command_keeps_its_backbone(example, monkeypatch, tmp_path):
    torch.manual_seed(6)
    labels = torch.randint(2, (600,))
    images = 0.5 * torch.rand(600, 3, 8, 8) + 0.5 * labels[:, None, None, None]
    data = SimpleNamespace(
        train=(images[:500], labels[:500]),
        test=(images[500:], labels[500:]),
        info=SimpleNamespace(classes=("dark", "light")),
    )
    monkeypatch.setattr(example, "load", lambda name, *, root: data)
    arguments = (
        f"random_prior.py --seconds 0.1 --width 1 --batch-size 8 --device cpu --epsilons 8 "
        f"--seeds 1 --backbone {tmp_path}/backbone.pt --json {tmp_path}/rows.json"
    )
    monkeypatch.setattr(sys, "argv", arguments.split())
    example.main()
    first = json.loads((tmp_path / "rows.json").read_text())
    monkeypatch.delattr(example, "pretrain")  # the second time there is nothing to train
    example.main()
    (row,), (again,) = first, json.loads((tmp_path / "rows.json").read_text())
    assert row.keys() == {
        "dataset", "recipe", "epsilon", "delta", "seed", "accuracy", "seconds"
    }  # fmt: skip
    assert row["epsilon"] <= 8.0
    assert row["epsilon"] == again["epsilon"]  # accuracies differ: noise is fresh


def test_pretraining_goes_on_where_compiling_fails(example, monkeypatch, capsys):
    def broken(function):
        def call(x):
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    example.pretrain(seconds=60.0, steps=1, width=1, batch_size=8, compile=True)
    assert "Not compiled: RuntimeError" in capsys.readouterr().out
