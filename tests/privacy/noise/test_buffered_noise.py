"""Noise from buffers: the proof of its rounding, its sensitivity in runs, its error, its books."""

import copy
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from clipless import PrivacyEngine
from clipless import nn as lip
from clipless.accounting.correlated import BufferedStrategy, OptimizerWorkload, error_by_step
from clipless.common import Query
from clipless.errors import PrivacyError
from clipless.kernels import KeyStream, grid_noise, next_key
from clipless.privacy import Correlated, Plan
from clipless.privacy.noise._buffered import BufferedNoise, largest_rounding
from clipless.privacy.noise._correlated import PART
from tests.privacy.epochs import epochs_run, paid, watched
from tests.privacy.runs import mlp
from tests.privacy.step.test_epochs import largest_sensitivity, mixing

STEPS, PASS = 12, 5
STRATEGY = BufferedStrategy(steps=STEPS, amplitudes=(0.3, 0.25, 0.2), decays=(0.3, 0.8, 0.98))
BUFFERS = Correlated(buffers=2)
KEY = bytes(range(32))


def drawn(strategy, entries=50, key=KEY):
    """The noise of every step, in whole numbers, and the z that it was made of."""
    noise, keys, found = BufferedNoise(strategy, key=key), [key], []
    for _ in range(strategy.steps):
        found.append(noise._draw([torch.zeros(entries)])[0])
        keys.append(next_key(keys[-1]))
    z = [grid_noise(entries, KeyStream(each), 0) for each in keys[:-1]]
    return torch.stack(found), torch.stack(z)


@pytest.mark.parametrize(
    "strategy",
    [STRATEGY, BufferedStrategy(steps=60, amplitudes=(0.5, 0.4), decays=(0.1, 1 - 2.0**-11))],
)
def test_what_rounding_adds_is_within_its_bound(strategy):
    """In exact fractions: e_t, of the module's text, from the noise that was made."""
    noise, z = drawn(strategy, entries=5)
    largest, amplitudes = 0, [Fraction(a) for a in strategy.amplitudes]
    decays = [Fraction(d) for d in strategy.decays]
    for entry in range(5):
        buffers = [Fraction(0)] * len(decays)
        for step in range(strategy.steps):
            wanted = PART * sum(a * m for a, m in zip(amplitudes, buffers, strict=True))
            # N = floor((z - P) / 2^10 + 1/2): P lies within 2^9 of z - 2^10 N, and e = wanted - P.
            made = int(noise[step, entry])
            exact = (int(z[step, entry]) - wanted) / PART
            largest = max(largest, abs(made - exact))
            buffers = [d * m + made for d, m in zip(decays, buffers, strict=True)]
    assert float(largest) <= 0.5 + largest_rounding(strategy) / PART
    assert float(largest) > 0.4  # it rounds


def test_the_noise_follows_from_earlier_releases_before_z_is_drawn():
    """With another key from some step on, what is taken back in that step is the same."""
    noise, z = drawn(STRATEGY)
    first = BufferedNoise(STRATEGY, key=KEY)
    for _ in range(6):
        first._draw([torch.zeros(50)])
    first._key = bytes(32)
    other = first._draw([torch.zeros(50)])[0]
    fresh = grid_noise(50, KeyStream(bytes(32)), 0)
    difference = (noise[6] - other) * PART - (z[6] - fresh)
    assert int(difference.abs().max()) <= PART


def test_neighbours_whose_mechanisms_agree_release_nearly_the_same(monkeypatch):
    """V moved by v and z by -C v: releases differ by what rounding adds, and by no more."""
    steps, entries = STEPS, 40
    rng = np.random.default_rng(0)
    column = STRATEGY.coefficients()
    matrix = np.tril(column[np.subtract.outer(np.arange(steps), np.arange(steps)).clip(0)])
    values = rng.integers(-(2**18), 2**18, size=(steps, entries))
    moved = rng.integers(-(2**14), 2**14, size=(steps, entries))
    from clipless.privacy.noise import _buffered as module

    z = [grid_noise(entries, KeyStream(KEY), step) for step in range(steps)]
    shift = [torch.from_numpy(np.rint(PART * row)).long() for row in matrix @ moved]

    def released(values, z):
        noise, found, step = BufferedNoise(STRATEGY, key=KEY), [], iter(z)
        monkeypatch.setattr(module, "grid_noise", lambda *_: next(step))
        for row in values:
            found.append(torch.from_numpy(row) + noise._draw([torch.zeros(entries)])[0])
        return torch.stack(found)

    one = released(values, z)
    other = released(values + moved, [a - b for a, b in zip(z, shift, strict=True)])
    assert int((one - other).abs().max()) <= 1
    apart = released(values + moved, z)
    assert int((one - apart).abs().max()) > 2**10


@pytest.mark.parametrize("noise", [BUFFERS, Correlated(buffers=1)])
def test_what_is_paid_is_the_sensitivity_of_what_was_added(noise):
    run = epochs_run(steps=STEPS, noise=noise)
    key = run.engine.session.noise._key
    watcher, taken = watched(run, STEPS)
    watcher.key = key
    matrix, strategy = mixing(run, watcher), run.engine.plan.strategy
    assert isinstance(run.engine.session.noise, BufferedNoise)
    column = strategy.coefficients()
    wanted = np.tril(column[np.subtract.outer(np.arange(STEPS), np.arange(STEPS)).clip(0)])
    assert np.allclose(matrix, wanted, atol=2e-3)
    assert taken[:PASS] == taken[PASS : 2 * PASS]
    worst = 0.0
    for example in range(23):
        columns = matrix[:, [step for step, batch in enumerate(taken) if example in batch]]
        worst = max(worst, float(np.square(columns.sum(axis=1)).sum()))  # no entry is negative
    assert worst <= paid(run) * (1 + 2e-3)
    assert worst == pytest.approx(paid(run), rel=0.02)
    assert largest_sensitivity(matrix[:, :PASS], taken[:PASS], 23) < worst  # later passes add
    assert run.engine.ledger.releases == 3


def test_measured_errors_are_the_computed_ones():
    rows = []
    for seed in range(4):
        model = nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(6, 512), lip.SpectralLinear(512, 3)
        )
        run = epochs_run(
            steps=STEPS, engine=PrivacyEngine(insecure_seed=seed), model=model, noise=BUFFERS
        )
        watcher, _ = watched(run, STEPS)
        rows.append(watcher.noise)
    noise = torch.cat(rows, dim=1)
    sums = OptimizerWorkload(steps=STEPS).matrix()
    measured = (torch.from_numpy(sums) @ noise).square().mean(dim=1).sqrt().numpy()
    computed = error_by_step(sums, run.engine.plan.strategy)
    assert float(np.linalg.norm(measured) / np.linalg.norm(computed)) == pytest.approx(1, abs=0.02)


def test_a_killed_run_repeats_and_goes_on_with_its_buffers(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = epochs_run(engine=PrivacyEngine(ledger=path), noise=BUFFERS).steps(3)
    state, model = copy.deepcopy(run.engine.state_dict()), mlp()
    model.load_state_dict(run.model.state_dict())
    run.steps(4)
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.engine.close()
    again = epochs_run(
        model=model, engine=PrivacyEngine(ledger=path), resume_from=state, noise=BUFFERS
    )
    again.steps(4)
    assert all(map(torch.equal, weights, again.model.parameters()))
    assert again.engine.ledger.releases == 2
    again.steps(STEPS - 7)
    assert again.engine.get_epsilon() == again.engine.plan.epsilon()
    assert all(len(each) == 2 for each in again.engine.session.noise._buffers)


def test_noise_that_begins_anew_is_paid_for_as_a_mechanism_of_its_own():
    schedule = epochs_run(noise=BUFFERS).engine.plan.schedule
    rest = sum(n * each.noise_multiplier**-2 for each, n in schedule.cost(4, STEPS, first=4))
    alone = schedule.strategy.after(4).sensitivity(participations=2, separation=PASS) ** 2
    assert rest * schedule.noise_multiplier**2 == pytest.approx(alone, rel=1e-6)


def test_the_rule_takes_buffers_where_bands_need_too_much_memory():
    run = epochs_run(size=200, batch_size=2, steps=100, noise=Correlated(most_memory=8))
    plan = run.engine.plan
    assert isinstance(plan.strategy, BufferedStrategy)
    assert plan.strategy_error < 0.4
    assert "3 buffers" in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.noise_gain(0) == pytest.approx(1.0)
    assert 1.0 < plan.noise_gain() < 2.0


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="bands or buffers"):
        Correlated(bands=2, buffers=2)
    near = BufferedStrategy(steps=20_000, amplitudes=(0.9,), decays=(1 - 1e-9,))
    noise = BufferedNoise(near, key=KEY)
    values = [torch.zeros(1000)]
    with pytest.raises(PrivacyError, match="so near to 1"):
        noise.add_(values, [Query("w", 1.0, 1.0)])
    with pytest.raises(PrivacyError, match="not that of this strategy"):
        BufferedNoise(STRATEGY, key=KEY).load_state_dict(
            {"step": torch.tensor(1), "chacha20": torch.zeros(32), "0/0": torch.zeros(3)}
        )
    with pytest.raises(ValueError, match="amplitudes and decays"):
        BufferedStrategy.from_dict({"steps": 1, "decays": []})
