"""One noise of the right variance, whoever draws it."""

import math

import pytest
import torch

from clipless import PrivacyEngine
from clipless.privacy import PoissonSampling
from tests.distributed.group import together
from tests.distributed.runs import WRAPPERS, private_run
from tests.privacy.runs import cnn, mlp

STEPS = 60
EMPTY = PoissonSampling(dataset_size=100, rate=1e-7)  # no example is ever drawn: noise is all


def noise_of(make, wrapper, seed):
    """What this process adds to each parameter in every step, over its standard deviation."""
    run = private_run(
        make,
        wrapper,
        sampling=EMPTY,
        noise_multiplier=1.0,
        engine=PrivacyEngine(insecure_seed=seed),
    )
    deviations = run.engine.plan.noise_deviations
    found = {}

    def read(optimizer, args, kwargs):
        for name, parameter in run.inner.named_parameters():
            if parameter.grad is not None:
                gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
                found.setdefault(name, []).append(gradient.flatten() / deviations[name])

    run.optimizer.register_step_pre_hook(read)
    run.steps(STEPS)
    assert run.loader.current.size == 0
    return {name: torch.stack(each) for name, each in found.items()}


def every_wrapper(seed):
    return {(make.__name__, w): noise_of(make, w, seed) for make in (mlp, cnn) for w in WRAPPERS}


@pytest.mark.parametrize("seed", [3, None], ids=["seeded", "unseeded"])
def test_noise_has_the_planned_variance_once(seed):
    results = together(every_wrapper, 2, seed)
    for make in (mlp, cnn):
        sizes = {name: p.numel() for name, p in make().named_parameters()}
        for wrapper in WRAPPERS:
            parts = [result[make.__name__, wrapper] for result in results]
            for name, size in sizes.items():
                drawn = [part[name] for part in parts if name in part]
                entries = torch.cat(drawn, dim=1).double()
                assert entries.shape == (STEPS, size), "each entry gets its noise once"
                count = entries.numel()
                assert abs(entries.var(correction=0) - 1) < 5 * math.sqrt(2 / count)
                assert abs(entries.mean()) < 5 / math.sqrt(count)
            # What two processes draw has nothing to do with each other.
            first, second = (torch.cat([*part.values()], dim=1).flatten() for part in parts)
            length = min(len(first), len(second))
            correlation = (first[:length].double() @ second[:length].double()) / length
            assert abs(correlation) < 5 / math.sqrt(length)
