"""Twenty correct runs, audited at 95% confidence: no lower bound is above the claimed epsilon.

Of several kinds, most of them with canaries that are as easy to find as canaries can be.
"""

import pytest
import torch
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.audit import audit_training, orthogonal_canaries
from clipless.training import Trainer, TrainingOptions
from tests.audit.broken import background, table_trainer, tokens
from tests.audit.nominal import nominal_epsilons  # noqa: F401


def table_audit(seed, *, canaries, guesses=None, **options):
    return audit_training(
        table_trainer(canaries + 4, seed=seed, **options),
        background(),
        canaries=tuple(part[4:] for part in tokens(canaries + 4)),
        guesses=guesses,
        seed=seed,
    )


def full_batch(seed):
    """Every canary in every step, its gradient at the bound: the most there is to find."""
    noise = (1.0, 2.0, 3.0, 5.0)[seed % 4]
    return table_audit(seed, canaries=20_000, guesses=(200, 200), noise=noise, steps=1 + seed % 3)


def little_noise(seed):
    """A large epsilon, at which nearly every guess is right."""
    return table_audit(seed, canaries=2_000, noise=0.25, steps=1)


def poisson(seed):
    return table_audit(seed, canaries=10_000, noise=1.0, steps=20, rate=0.1)


def replaced(seed):
    """Batches of fixed size, private for replace-one: every canary has a stand-in."""
    x, y = tokens(5_004)
    return audit_training(
        table_trainer(5_004, seed=seed, noise=2.0, steps=8, fixed=1_000),
        background(),
        canaries=(x[4:], y[4:]),
        stand_ins=(x[4:], 1 - y[4:]),
        seed=seed,
    )


def network(seed, observed="releases"):
    """A network as one would train it, on canaries and ordinary examples."""

    def make(size):
        torch.manual_seed(seed)
        model = nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(64, 32, bias=True), lip.GroupSort(2),
            lip.SpectralLinear(32, 4),
        )  # fmt: skip
        return Trainer(
            model,
            losses.CrossEntropy(tau=8.0),
            target_epsilon=3.0,
            batch_size=100,
            steps=30,
            training=TrainingOptions(insecure_seed=seed),
        )

    generator = torch.Generator().manual_seed(seed)
    data = (
        torch.randn(200, 64, generator=generator), torch.randint(4, (200,), generator=generator),
    )  # fmt: skip
    canaries = orthogonal_canaries(500, input_shape=(64,), classes=4, seed=seed)
    return audit_training(make, data, canaries=canaries, observed=observed, seed=seed)


def final_model(seed):
    return network(seed, observed="model")


RUNS = [
    *((full_batch, seed) for seed in range(8)),
    *((little_noise, seed) for seed in range(2)),
    *((poisson, seed) for seed in range(3)),
    *((replaced, seed) for seed in range(2)),
    *((network, seed) for seed in range(3)),
    *((final_model, seed) for seed in range(2)),
]


def test_there_are_twenty():
    assert len(RUNS) == 20


@pytest.mark.parametrize(("run", "seed"), RUNS, ids=lambda part: getattr(part, "__name__", part))
def test_a_correct_run_is_not_exposed(run, seed):
    result = run(seed)
    assert result.confidence == 0.95
    assert result.claimed_epsilon > 0
    assert result.lower_bound <= result.claimed_epsilon
    if run in (full_batch, little_noise):
        # The audit has power here: it is not silent, it stays below.
        assert result.lower_bound > 0.25 * min(result.claimed_epsilon, 4.0)
