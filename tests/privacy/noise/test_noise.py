"""Noise: the right amount on every parameter, independent, fresh; sigma shared out, not changed."""

import copy
import math
import pickle
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clipless.common import Query
from clipless.kernels import joint_multiplier
from clipless.privacy import GaussianNoise
from clipless.privacy.noise._scales import STRATEGIES, noise_scales

positive = st.floats(1e-3, 1e3)


@given(
    sensitivities=st.lists(positive, min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 10**6), min_size=6, max_size=6),
    strategy=st.sampled_from(STRATEGIES),
)
def test_every_strategy_delivers_the_same_multiplier(sensitivities, sizes, strategy):
    scales = noise_scales(strategy, sensitivities=sensitivities, sizes=sizes[: len(sensitivities)])
    assert joint_multiplier(sensitivities, scales) == pytest.approx(1.0, rel=1e-9)


@given(
    sensitivities=st.lists(positive, min_size=3, max_size=3),
    coefficients=st.lists(positive, min_size=3, max_size=3),
)
def test_coefficients_change_the_shares_and_not_the_multiplier(sensitivities, coefficients):
    scales = noise_scales(
        "per_layer", sensitivities=sensitivities, sizes=[1, 2, 3], coefficients=coefficients
    )
    assert joint_multiplier(sensitivities, scales) == pytest.approx(1.0, rel=1e-9)
    shares = [s / d / c for s, d, c in zip(scales, sensitivities, coefficients, strict=True)]
    assert shares == pytest.approx([shares[0]] * 3)


def test_formulas():
    options = {"sensitivities": [3.0, 4.0], "sizes": [16, 1]}
    assert noise_scales("global", **options) == [5.0, 5.0]
    root = math.sqrt(2)
    assert noise_scales("per_layer", **options) == pytest.approx([3 * root, 4 * root])
    total = 3 * 4 + 4 * 1
    expected = [math.sqrt(3 / 4 * total), math.sqrt(4 / 1 * total)]
    assert noise_scales("optimal", **options) == pytest.approx(expected)


@given(
    sensitivities=st.lists(positive, min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 10**5), min_size=5, max_size=5),
    others=st.lists(st.floats(0.2, 5.0), min_size=5, max_size=5),
)
def test_optimal_has_the_least_energy(sensitivities, sizes, others):
    """No other way of sharing out the same multiplier has less expected noise energy."""
    sizes = sizes[: len(sensitivities)]

    def energy(scales):
        return sum(p * s**2 for p, s in zip(sizes, scales, strict=True))

    best = noise_scales("optimal", sensitivities=sensitivities, sizes=sizes)
    other = [s * f for s, f in zip(best, others, strict=False)]
    multiplier = joint_multiplier(sensitivities, other)
    assert energy(best) <= energy([s / multiplier for s in other]) * (1 + 1e-9)


def test_a_parameter_nobody_influences_gets_no_noise():
    for strategy in STRATEGIES:
        scales = noise_scales(strategy, sensitivities=[1.0, 0.0], sizes=[4, 4])
        assert scales[1] == 0
        assert joint_multiplier([1.0, 0.0], scales) == pytest.approx(1.0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="global, per_layer, optimal"):
        noise_scales("loud", sensitivities=[1.0], sizes=[1])
    with pytest.raises(ValueError, match="per_layer"):
        noise_scales("global", sensitivities=[1.0], sizes=[1], coefficients=[1.0])
    with pytest.raises(ValueError, match="positive numbers"):
        noise_scales("per_layer", sensitivities=[1.0], sizes=[1], coefficients=[0.0])


# --- the noise itself ----------------------------------------------------------------------------


def draw(noise, deviations, shapes, dtype=torch.float32):
    gradients = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    noise.add_(gradients, queries(deviations))
    return gradients


def queries(deviations):
    return [Query("", deviation, deviation) for deviation in deviations]


def test_variance_of_every_group_within_one_percent():
    """200,000 draws: a factor of 1.05 on one standard deviation is 30 standard errors away."""
    deviations = [0.1, 3.0, 40.0]
    parts = draw(
        GaussianNoise(insecure_seed=1), deviations, [(400, 500), (200_000,), (20, 100, 100)]
    )
    for part, deviation in zip(parts, deviations, strict=True):
        scaled = part.flatten().double() / deviation
        error = 1 / math.sqrt(2 * scaled.numel())
        assert abs(scaled.std().item() - 1) < 4 * error
        assert abs(scaled.mean().item()) < 4 / math.sqrt(scaled.numel())
        assert stats.kstest(scaled.numpy(), "norm").pvalue > 1e-4


def test_the_variance_test_would_catch_five_percent():
    part = draw(GaussianNoise(insecure_seed=1), [1.05], [(200_000,)])[0].double()
    assert abs(part.std().item() - 1) > 4 / math.sqrt(2 * part.numel())


def test_independence_between_parameters_and_steps():
    noise = GaussianNoise(insecure_seed=2)
    first = draw(noise, [1.0, 1.0], [(100_000,), (100_000,)])
    second = draw(noise, [1.0, 1.0], [(100_000,), (100_000,)])
    parts = [*first, *second]
    for i in range(4):
        for j in range(i):
            correlation = (parts[i] * parts[j]).mean().item()
            assert abs(correlation) < 4 / math.sqrt(100_000)
    lagged = (parts[0][1:] * parts[0][:-1]).mean().item()
    assert abs(lagged) < 4 / math.sqrt(100_000)


def test_it_is_added_and_does_not_replace():
    gradient = torch.full((100_000,), 7.0)
    GaussianNoise(insecure_seed=0).add_([gradient], queries([0.5]))
    assert gradient.mean().item() == pytest.approx(7.0, abs=0.01)


def test_zero_deviation_changes_nothing():
    gradient = torch.randn(10)
    before = gradient.clone()
    GaussianNoise(insecure_seed=0).add_([gradient], queries([0.0]))
    assert gradient.equal(before)


def test_seeds():
    a, b, c = (GaussianNoise(insecure_seed=s) for s in (5, 5, 6))
    one, two, three = (draw(n, [1.0], [(50,)])[0] for n in (a, b, c))
    assert one.equal(two)
    assert not one.equal(three)
    assert a.insecure
    assert not GaussianNoise().insecure
    fresh = [draw(GaussianNoise(), [1.0], [(50,)])[0] for _ in range(2)]
    assert not fresh[0].equal(fresh[1])


def test_state_continues_the_noise():
    noise = GaussianNoise(insecure_seed=3)
    draw(noise, [1.0], [(10,)])
    state = noise.state_dict()
    expected = draw(noise, [1.0], [(10,)])[0]
    other = GaussianNoise()
    other.load_state_dict(state)
    assert draw(other, [1.0], [(10,)])[0].equal(expected)


def test_half_precision_gradients_get_float32_noise():
    part = draw(GaussianNoise(insecure_seed=0), [1.0], [(100_000,)], dtype=torch.bfloat16)[
        0
    ].double()
    assert part.std().item() == pytest.approx(1.0, abs=0.02)


def test_every_entry_gets_a_draw_of_its_own_in_any_layout():
    """Noise is laid out like the gradients, so that all are added at once; none is used twice."""
    shapes = [(4, 3, 3, 3), (5, 7), (6, 4, 3, 3), (2,)]
    gradients = [torch.zeros(shape) for shape in shapes]
    gradients[2] = gradients[2].to(memory_format=torch.channels_last)
    gradients.append(torch.zeros(8, 6)[:, ::2])  # with gaps
    gradients.append(torch.zeros(3, 5).T)
    layouts = [gradient.stride() for gradient in gradients]
    noise = GaussianNoise(insecure_seed=1)
    noise.add_(gradients, queries([1.0] * len(gradients)))
    drawn = torch.cat([gradient.flatten() for gradient in gradients])
    assert len(drawn.unique()) == sum(gradient.numel() for gradient in gradients)
    assert [gradient.stride() for gradient in gradients] == layouts
    again = [torch.zeros_like(gradient) for gradient in gradients]
    noise.add_(again, queries([1.0] * len(again)))  # the same shapes, gaps closed
    assert not set(drawn.tolist()) & set(torch.cat([each.flatten() for each in again]).tolist())


def drawn(noise):
    value = torch.zeros(4, dtype=torch.float64)
    noise.add_([value], [Query("a", 1.0, 1.0)])
    return tuple(value.tolist())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_have_noise_of_their_own(copied):
    noise = GaussianNoise()
    assert drawn(copied(noise)) != drawn(noise)
    insecure = GaussianNoise(insecure_seed=3)
    other = copied(insecure)
    assert other.insecure
    assert drawn(other) == drawn(insecure)


def test_threads_that_release_at_once_never_share_noise():
    noise, found, together = GaussianNoise(), [], threading.Barrier(4)

    def release():
        together.wait()
        found.extend(drawn(noise) for _ in range(150))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=release) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(set(found)) == len(found) == 600
