"""The audit exposes trainers that are broken, and leaves the same trainers alone when they are not.

Halved noise, faked sampling and a wrong bound: the lower bound at 95% confidence is above the
claimed epsilon in every one of several runs. What a broken trainer claims is what the correct one
claims, for the ledger is told the same.
"""

import itertools

import pytest

from clipless.audit import audit_repeated_training, audit_training
from clipless.training import Trainer
from tests.audit.broken import (
    Amplify,
    FakedSampling,
    HalvedNoise,
    NotEnforced,
    background,
    table_trainer,
    tokens,
    wrong_rule,
)
from tests.audit.nominal import nominal_epsilons  # noqa: F401

CANARIES = 50_000
GUESSES = (500, 500)  # from a simulation of Gaussian scores, not from these runs
FULL_BATCH = {"noise": 2 / 0.6, "steps": 4}
POISSON = {"noise": 2.0, "steps": 20, "rate": 0.1}


def one_run(seed, *, guesses=GUESSES, canaries=CANARIES, **options):
    return audit_training(
        table_trainer(canaries + 4, seed=seed, **options),
        background(),
        canaries=tuple(part[4:] for part in tokens(canaries + 4)),
        guesses=guesses,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(3))
def test_halved_noise_is_exposed(seed):
    broken = one_run(seed, kind=HalvedNoise, **FULL_BATCH)
    assert broken.exposed
    assert broken.p_value < 0.05
    correct = one_run(seed, **FULL_BATCH)
    assert correct.claimed_epsilon == pytest.approx(broken.claimed_epsilon, rel=1e-6)
    assert not correct.exposed


@pytest.mark.parametrize("seed", range(3))
def test_faked_sampling_is_exposed(seed):
    """A canary that is in the one batch is seen in every step; the others never."""
    broken = one_run(seed, kind=FakedSampling, guesses=(500, 0), canaries=20_000, **POISSON)
    assert broken.exposed
    correct = one_run(seed, guesses=(500, 0), canaries=20_000, **POISSON)
    assert correct.claimed_epsilon == pytest.approx(broken.claimed_epsilon, rel=1e-6)
    assert not correct.exposed


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_bound_is_exposed(seed):
    """The sensitivity of the table is four times what the rule of a later layer makes it.

    Where bounds are enforced, a rule that is wrong contradicts nothing.
    """
    options = {"extra": (Amplify(),), "canaries": 20_000, "guesses": (200, 200), **FULL_BATCH}
    with wrong_rule():
        broken = one_run(seed, kind=NotEnforced, **options)
        correct = one_run(seed, **options)
    assert broken.exposed
    assert broken.lower_bound > 1.3 * broken.claimed_epsilon
    assert not correct.exposed


def test_the_default_guesses_expose_the_large_ones_too():
    """Nobody has to choose numbers of guesses to find a bound that is wrong by a factor of 4."""
    with wrong_rule():
        wrong = one_run(
            0, kind=NotEnforced, extra=(Amplify(),), guesses=None, canaries=5_000, **FULL_BATCH
        )
    faked = one_run(0, kind=FakedSampling, guesses=None, canaries=20_000, **POISSON)
    assert wrong.exposed
    assert faked.exposed
    assert wrong.choices == faked.choices == 5


def repeated(kind, runs, delta=0.1):
    x, y = tokens(5)
    return audit_repeated_training(
        table_trainer(5, kind=kind, noise=1 / 1.25, steps=1, seed=itertools.count()),
        background(),
        canary=(x[4:], y[4:]),
        runs=runs,
        delta=delta,
    )


def test_many_runs_expose_halved_noise():
    broken = repeated(HalvedNoise, 300)
    assert broken.exposed
    assert broken.runs == 300


@pytest.mark.slow
def test_many_runs_leave_a_correct_trainer_alone():
    correct = repeated(Trainer, 300, delta=0.02)
    assert not correct.exposed
    assert correct.lower_bound > 0.2  # it is not that nothing was found
