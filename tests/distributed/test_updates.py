"""One, two and four processes make the same updates, for the same price."""

import pytest
import torch
import torch.distributed as dist

from clipless import clip_products, losses
from clipless import nn as lip
from clipless.privacy import PoissonSampling
from tests.distributed.group import together
from tests.distributed.runs import WRAPPERS, final_weights, largest_difference, private_run
from tests.privacy.runs import cnn, mlp

TINY = PoissonSampling(dataset_size=100, rate=0.02)


def following():
    return torch.nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(6, 8),
        lip.GroupSort(2),
        lip.SpectralLinear(8, 3),
        lip.ClipGradient(0.5, follow=lip.FollowQuantile(quantile=0.5)),
    )


def clipped():
    """Gradients are clipped at every layer, which depends on what the loss is divided by."""
    model = mlp()
    clip_products(model, fraction=0.05, loss=losses.CrossEntropy(), input_shape=(6,))
    return model


CASES = {
    "mlp": (mlp, {}),
    "cnn": (cnn, {}),
    "micro-batches": (mlp, {"micro_batch_size": 3}),
    "padded": (mlp, {"pad": True}),
    "empty parts": (mlp, {"sampling": TINY}),
    "fixed size": (mlp, {"sampling": "fixed_size"}),
    "following": (following, {}),
    "clipped": (clipped, {}),
}


def updates(wrappers, cases):
    """The final weights of every case, the smallest part of a sample, and epsilon."""
    found = {}
    for case in cases:
        for wrapper in wrappers:
            make, options = CASES[case]
            run = private_run(make, wrapper, noise_multiplier=0.0, **options)
            sizes = []
            for _ in range(8):
                run.step()
                sizes.append(run.loader.current.size)
            found[case, wrapper] = (final_weights(run), min(sizes), _threshold(run))
            run.engine.close()
    run = private_run(mlp, wrappers[0], noise_multiplier=1.0).steps(5)
    return found, run.engine.get_epsilon()


def _threshold(run):
    layers = [m for m in run.inner.modules() if isinstance(m, lip.ClipGradient)]
    return layers[0].threshold() if layers else None


@pytest.fixture(scope="module")
def alone():
    return together(updates, 1, ("bare",), tuple(CASES))[0]


@pytest.mark.parametrize("size", [2, 4])
def test_processes_update_as_one_does(alone, size):
    few = ("mlp", "cnn", "empty parts", "clipped")
    cases = tuple(CASES) if size == 2 else few
    results = together(updates, size, WRAPPERS, cases)
    for found, epsilon in results:
        assert epsilon == alone[1]
        for (case, wrapper), (weights, _, threshold) in found.items():
            expected, _, expected_threshold = alone[0][case, "bare"]
            assert largest_difference(weights, expected) < 1e-5, (case, wrapper)
            # Bit for bit the same everywhere.
            assert largest_difference(weights, results[0][0][case, wrapper][0]) == 0
            if threshold is not None:
                assert threshold == pytest.approx(expected_threshold, rel=1e-5)
                assert threshold != 0.5
    # Empty parts did happen, in processes that took the step all the same.
    assert min(found["empty parts", "bare"][1] for found, _ in results) == 0


def ordinary():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    )


def enforced(wrapper):
    """Weights, thresholds and bounds of a network whose thresholds follow a quantile."""
    run = private_run(ordinary, wrapper, noise_multiplier=0.0, bounds="enforced")
    for _ in range(8):
        run.step()
    thresholds = run.engine.session.thresholds.values()
    return final_weights(run), thresholds, run.engine.plan.sensitivities


def test_enforced_bounds_in_several_processes():
    """Examples are counted over all processes, and thresholds move as they do in one."""
    ((weights, thresholds, bounds),) = together(enforced, 1, "bare")
    for wrapper in ("bare", "ddp"):
        for found in together(enforced, 2, wrapper):
            assert largest_difference(found[0], weights) < 1e-5
            assert found[1:] == (thresholds, bounds)
    assert len(set(thresholds.values())) > 1


def test_the_comparison_can_fail(alone):
    weights, moved = alone[0]["mlp", "bare"][0], alone[0]["micro-batches", "bare"][0]
    assert largest_difference(weights, moved) < 1e-5
    assert largest_difference(weights, alone[0]["clipped", "bare"][0]) > 1e-2
    torch.manual_seed(0)
    begun = [parameter.detach() for parameter in mlp().parameters()]
    assert largest_difference(weights, begun) > 1e-2


def one_process(folder):
    """A process group of one, as for trying out a program."""
    alone = final_weights(private_run(mlp, noise_multiplier=0.0).steps(5))
    dist.init_process_group("gloo", init_method=f"file://{folder}/one", rank=0, world_size=1)
    return [
        largest_difference(alone, final_weights(private_run(mlp, w, noise_multiplier=0.0).steps(5)))
        for w in WRAPPERS
    ]


def test_a_group_of_one_process_is_alone(tmp_path):
    assert together(one_process, 1, tmp_path) == [[0.0, 0.0, 0.0]]
