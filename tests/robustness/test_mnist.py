"""Real MNIST: a private network is trained, its 10,000 test images certified and attacked.

    CLIPLESS_DATA=FOLDER python -m pytest tests/robustness/test_mnist.py -m slow -s

FOLDER is the root of `clipless.data`: the four IDX files lie in its folder mnist. Takes some ten
minutes on one core. With a GPU the attack is stronger: 20 restarts of 50 steps on all images.
"""

import os

import pytest
import torch
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.audit import TightnessCallback
from clipless.privacy import ProvedBounds
from clipless.robustness import (
    AttackOptions,
    attack_certificates,
    certified_accuracy,
    certified_radius,
)
from clipless.training import LayerAdam, Trainer, TrainingOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("CLIPLESS_DATA" not in os.environ, reason="CLIPLESS_DATA names no folder"),
]

STEPS, BATCH_SIZE, EPSILON = 150, 1024, 3.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTACK = {"steps": 50, "restarts": 20} if DEVICE == "cuda" else {"steps": 6, "restarts": 2}


def lenet():
    return nn.Sequential(
        lip.BoundedInput(1.0, mode="sphere"),
        lip.SpectralConv2d(1, 16, 5, padding="same"),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(16, 32, 3, padding="same"),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        nn.Flatten(),
        lip.SpectralLinear(32 * 7 * 7, 64),
        lip.GroupSort(2),
        lip.SpectralLinear(64, 10, constraint="ball"),
        lip.ClipGradient(0.05),
    )


@pytest.fixture(scope="module")
def trained():
    from clipless import data

    # The slack in the sensitivities covers float32, not TF32, torch's default for convolutions.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    mnist = data.load("mnist", download=False)
    torch.manual_seed(0)
    watch = TightnessCallback(mnist.train, examples=64)
    trainer = Trainer(
        lenet(),
        losses.CrossEntropy(tau=256.0),
        target_epsilon=EPSILON,
        target_delta=1e-5,
        batch_size=BATCH_SIZE,
        steps=STEPS,
        bounds=ProvedBounds(product_clip=0.15),
        training=TrainingOptions(
            optimizer=lambda parameters: LayerAdam(parameters, lr=0.01),
            average=None,
            device=DEVICE,
            callbacks=[watch],
        ),
    )
    trainer.fit(mnist.train)
    return trainer.model.eval(), *mnist.test, watch


def test_no_certificate_of_ten_thousand_breaks(trained):
    model, x, *_ = trained
    assert len(x) == 10_000
    result = attack_certificates(model, x, attack=AttackOptions(ladder=(), **ATTACK))
    print(result)
    assert result.broken == ()
    assert result.attacked > 9_900


def test_the_search_finds_how_far_certificates_are_from_the_truth(trained):
    model, x, *_ = trained
    result = attack_certificates(
        model, x[:100], attack=AttackOptions(steps=20, restarts=4, ladder=(3.0, 5.0, 8.0))
    )
    print(result)
    assert result.broken == ()
    assert len(result.ratios) > 90
    assert 1 <= result.ratios.min() < result.ratios.median() < 8


def test_certified_accuracy_table(trained):
    model, x, y, _ = trained
    for arithmetic in (torch.float64, torch.float32):
        for method in ("rows", "margin"):
            result = certified_accuracy(model, x, y, arithmetic=arithmetic, method=method)
            print(result)
            accuracies = list(result.accuracies)
            assert accuracies == sorted(accuracies, reverse=True)
            assert result.clean_accuracy > 0.9
            assert accuracies[5] > 0.8
    norms = x.flatten(1).norm(dim=1)
    print(f"norms of the images: mean {norms.mean():.2f}, {norms.min():.2f} to {norms.max():.2f}")
    assert torch.all(certified_radius(model, x[:100]) <= norms[:100])


def test_bounds_hold_on_the_training_data(trained):
    *_, watch = trained
    assert watch.results[0][0] == 0
    assert watch.results[-1][0] == STEPS
    for _, result in (watch.results[0], watch.results[-1]):
        print(result)
        assert result.violations == {}
