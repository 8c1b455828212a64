"""No example contributes more than its threshold, in any architecture, whatever it holds."""

import random

import pytest
import torch

from tests.privacy.enforced.architectures import KINDS, architecture
from tests.privacy.enforced.runs import plain_gradients, session_of, sums

CONSTANT = (2, 4)
FEW, MANY = range(len(KINDS)), range(len(KINDS), 72)


def adversarial(draw, count, rng):
    """Ordinary examples, enormous ones, constant ones, zeros, and some that are not finite."""
    x = draw(count)
    if not x.is_floating_point():
        x[0] = x[0, 0]  # one token again and again
        return x
    x[1] *= 1e4
    x[2] = 1e3
    x[3] = 0.0
    x[4] = x[4].flatten()[0]
    if rng.random() < 0.5:
        x[5] = float("nan")
    return x


def contributions(session, x, cotangents):
    """What each example adds to each sum: its cotangent alone is left."""
    rows = []
    for row in range(len(x)):
        alone = torch.zeros_like(cotangents)
        alone[row] = cotangents[row]
        rows.append(sums(session, [x], alone))
    return rows


def attack(seed):
    rng = random.Random(seed)
    model, draw = architecture(seed)
    scale = 10 ** rng.uniform(-2, 0.5)
    session = session_of(model, draw, thresholds=scale)
    divisor, limit = session.plan.loss_divisor, scale / session.plan.loss_divisor
    x = adversarial(draw, 9, rng)
    cotangents = torch.randn(9, 3) * 10.0 ** torch.randint(-3, 3, (9, 1)) / divisor
    reference = plain_gradients(model, x, cotangents)
    alone = contributions(session, x, cotangents)
    together = sums(session, [x], cotangents)
    uses = session.report.proof.planned.uses
    bounds = session.plan.sensitivities
    clipped = kept = 0
    for name, own in reference.items():
        for row, found in enumerate(alone):
            norm = float(torch.linalg.vector_norm(found[name].double()))
            assert norm <= bounds[name], (name, row)
            true = float(torch.linalg.vector_norm(own[row].double()))
            unstable = x.is_floating_point() and row in CONSTANT  # normalised, they are rounding
            if len(uses[name]) > 1 or unstable or not torch.isfinite(own[row]).all():
                continue
            # A threshold acts where it must, and nowhere else.
            factor = min(1.0, limit / max(true, 1e-30))
            expected = own[row] * factor
            error = torch.linalg.vector_norm((found[name] - expected).double())
            assert error <= 0.005 * limit + 1e-6 * true * factor, (name, row, norm, true * factor)
            clipped, kept = clipped + (factor < 0.9), kept + (factor == 1 and true > 0.01 * limit)
        added = sum(found[name].double() for found in alone)
        error = torch.linalg.vector_norm(together[name].double() - added)
        assert error <= 1e-3 * len(x) * limit, name
    return clipped, kept


def test_no_contribution_is_above_its_threshold():
    found = [attack(seed) for seed in FEW]
    clipped, kept = (sum(each) for each in zip(*found, strict=True))
    assert clipped > 100
    assert kept > 20  # both sides of the thresholds were met


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_no_contribution_is_above_its_threshold_in_many_architectures(seed):
    attack(seed)


@pytest.mark.parametrize("seed", FEW)
def test_an_emptied_record_moves_sums_by_the_sensitivity_at_most(seed):
    model, draw = architecture(seed)
    session = session_of(model, draw, thresholds=0.05)
    x, divisor = draw(8), session.plan.loss_divisor
    cotangents = torch.randn(8, 3) / divisor
    other, without = x.clone(), cotangents.clone()
    other[3] = draw(1)[0] if not x.is_floating_point() else 1e3
    without[3] = 0.0
    before, after = sums(session, [x], cotangents), sums(session, [other], without)
    bounds = session.plan.sensitivities
    for name in before:
        moved = torch.linalg.vector_norm((before[name] - after[name]).double())
        assert moved <= bounds[name] * (1 + 1e-6), name


def test_upper_bounds_of_norms_hold_too():
    for seed in (0, 1, 3, 7):
        model, draw = architecture(seed)
        session = session_of(model, draw, thresholds=0.05, exact=False)
        x = draw(6)
        cotangents = torch.randn(6, 3)
        for found in contributions(session, x, cotangents):
            for name, bound in session.plan.sensitivities.items():
                assert float(torch.linalg.vector_norm(found[name].double())) <= bound
