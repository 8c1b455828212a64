"""The total-amount-of-noise heuristic: what is kept, and what is not."""

import pytest

from clipless.privacy import PoissonSampling, noise_multiplier_for
from clipless.runs import RunConfig, load_data
from clipless.sweeps import Scale, total_noise, transfer
from clipless.sweeps._planned import planned_run, shrunk

DELTA = 1e-5


def scale(**changes):
    fields = {"dataset_size": 60_000, "batch_size": 512, "noise_multiplier": 0.6, "steps": 500}
    return Scale(**{**fields, **changes})


def test_the_noise_of_an_update_and_the_total_noise_are_kept():
    small = scale()
    large = transfer(small, batch_size=8192)
    assert large.noise_multiplier / large.batch_size == pytest.approx(0.6 / 512)
    assert total_noise(large) == pytest.approx(total_noise(small))
    assert large.steps == small.steps
    back = transfer(large, batch_size=512)
    assert back.noise_multiplier == pytest.approx(small.noise_multiplier)


def test_small_runs_are_far_less_private_than_the_total_noise_says():
    """The wall: at large sigma the estimate holds, at small sigma the truth is far above it."""
    large = transfer(scale(), batch_size=8192)
    small = transfer(large, batch_size=256)
    assert large.epsilon_estimate(DELTA) == pytest.approx(small.epsilon_estimate(DELTA))
    assert 0.75 < large.epsilon(DELTA) / large.epsilon_estimate(DELTA) < 1.05
    assert small.epsilon(DELTA) > 5 * small.epsilon_estimate(DELTA)


def test_more_data_give_a_better_epsilon_at_the_same_updates():
    small = transfer(scale(), batch_size=4096)
    more = transfer(small, dataset_size=600_000)
    assert more.noise_multiplier == small.noise_multiplier
    assert total_noise(more) == pytest.approx(10 * total_noise(small))
    assert more.epsilon(DELTA) < 0.2 * small.epsilon(DELTA)


def test_a_full_batch_is_one():
    whole = transfer(scale(), batch_size=60_000)
    assert whole.rate == 1.0
    assert whole.epsilon(DELTA) == pytest.approx(
        transfer(scale(), batch_size=59_999).epsilon(DELTA), rel=0.02
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({}, "say what"), ({"batch_size": 0}, "batch_size"), ({"batch_size": 70_000}, "exceeds")],
)
def test_bad_input(change, words):
    with pytest.raises(ValueError, match=words):
        transfer(scale(), **change)


def test_the_configuration_of_a_small_run():
    """The small run has the update noise of the large one, the same steps, and no target."""
    config = RunConfig.from_dict({
        "data": {"name": "digits"}, "model": {"name": "mlp"}, "privacy": {"epsilon": 2.0},
        "training": {"epochs": 4, "batch_size": 400},
    })  # fmt: skip
    data = load_data(config.data)
    large, steps = planned_run(config, data)
    assert steps == 16
    sampling = PoissonSampling(dataset_size=data.size, rate=400 / data.size)
    assert large.noise_multiplier == noise_multiplier_for(
        target_epsilon=2.0, target_delta=6e-5, steps=16, sampling=sampling
    )
    small = shrunk(config, data, 0.25)
    assert small.privacy.epsilon is None
    assert (small.training.batch_size, small.training.steps, small.training.epochs) == (
        100,
        16,
        None,
    )
    assert small.privacy.noise_multiplier / 100 == pytest.approx(large.noise_multiplier / 400)
