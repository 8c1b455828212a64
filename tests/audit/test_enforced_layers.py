"""Canaries in an ordinary network whose layers enforce their bounds: orthogonal, hardest labels."""

import torch
from torch import nn

from clipless import losses
from clipless.audit import audit_training_curve, hardest_labels, orthogonal_canaries
from clipless.privacy import EnforcedBounds, PrivacyOptions
from clipless.training import Trainer, TrainingOptions
from tests.audit.broken import LessNoise
from tests.audit.nominal import nominal_epsilons  # noqa: F401

SIZE, CLASSES = 1500, 3


def audited(kind, seed=0):
    """Every canary is longer than the threshold, so that its contribution is at the bound."""

    def make(size):
        torch.manual_seed(seed)
        return kind(
            nn.Sequential(nn.Linear(SIZE, CLASSES, bias=False)), losses.CrossEntropy(tau=4.0),
            noise_multiplier=2.0, steps=4, batch_size=size, target_delta=1e-5,
            options=PrivacyOptions(
                sampling="full_batch", bounds=EnforcedBounds(thresholds=0.05)
            ),
            training=TrainingOptions(
                insecure_seed=seed, scheduler=None, average=None,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
            ),
        )  # fmt: skip

    x, _ = orthogonal_canaries(SIZE, input_shape=(SIZE,), classes=CLASSES, norm=2.0)
    trainer = make(4)
    y = hardest_labels(x, model=trainer.model, criterion=trainer.criterion, classes=CLASSES)
    data = (torch.zeros(4, SIZE), torch.zeros(4).long())
    return audit_training_curve(
        make, data, canaries=(x, y), confidence=0.99, independent=True, seed=seed
    )


def test_canaries_are_found_where_layers_enforce_their_bounds():
    correct = audited(Trainer)
    assert not correct.exposed
    assert 0.4 * correct.claimed_epsilon < correct.lower_bound < correct.claimed_epsilon
    broken = type("HalfNoise", (LessNoise,), {"part": 0.5})
    found = audited(broken)
    assert found.exposed
    assert found.lower_bound > found.claimed_epsilon
