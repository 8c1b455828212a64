"""Two neighbours, the same keys: sums differ by the sensitivity, and nobody else's part moves."""

import pytest
import torch
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.privacy import FullBatch
from tests.privacy.runs import Run, cnn, examples, mlp, residual

ROWS = 4096
WAYS = {
    "eager": {},
    "micro-batches": {"micro_batch_size": 1500},
    "bfloat16": {"precision": "bfloat16"},
    "compiled": {"compile": True},
    "integers": {"micro_batch_size": 1500},
    "integers, compiled": {"compile": True},
}
"""With integers, weight gradients are added up as on a GPU, by the kernels' twin."""


def hostile(shape):
    """Rows whose gradients float32 adds up worst: large ones of one sign, then small opposite."""
    x, y = examples(1, shape)
    y = torch.zeros(ROWS, dtype=torch.long)
    y[ROWS // 2 + 1 :] = 1
    x = x.expand(ROWS, *shape).clone()
    x[ROWS // 2 + 1 :] *= 0.75 * ROWS * 2.0**-25
    return x, y


def sums(build, data, options):
    torch.manual_seed(0)
    run = Run(
        build(), data, losses.CrossEntropy(), batch_size=ROWS, noise_multiplier=1.0,
        sampling="full_batch", **options,
    )  # fmt: skip
    assert isinstance(run.engine.plan.sampling, FullBatch)
    seen = {}

    def catch(values, queries):
        seen.update({q.name: v.clone() for v, q in zip(values, queries, strict=True)})

    run.engine.session.noise.add_ = catch
    run.steps(1)
    return run.engine.plan, seen


LONG = [(residual, "compiled"), (residual, "integers, compiled"), (mlp, "integers, compiled")]
"""What takes long to compile, beside the networks that are compiled anyway."""


@pytest.mark.parametrize(
    ("build", "way"),
    [
        pytest.param(build, way, marks=[pytest.mark.slow] if (build, way) in LONG else [])
        for build in (mlp, cnn, residual)
        for way in WAYS
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_one_record_moves_computed_sums_by_its_sensitivity(build, way, monkeypatch, recwarn):
    if way.startswith("integers"):
        monkeypatch.setattr("clipless.kernels.exact._weights._KINDS", {"cpu": "float64"})
    shape = (6,) if build is mlp else (1, 4, 4)
    data = hostile(shape)
    plan, whole = sums(build, data, WAYS[way])
    monkeypatch.setattr("clipless.privacy.sampling._loader.empty_row", lambda size: 0)
    again, without = sums(build, data, WAYS[way])
    assert plan == again
    moved = False
    for name, sensitivity in plan.sensitivities.items():
        distance = torch.linalg.vector_norm(whole[name].double() - without[name].double())
        assert distance <= sensitivity, name
        moved |= bool(distance > 0)
    assert moved  # the record was there
    told = [str(each.message) for each in recwarn]
    assert not [each for each in told if "could not be compiled" in each]


def test_others_contribute_the_same_bit_for_bit():
    """What flows to every layer for the other rows does not depend on the row that changes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        lip.SpectralConv2d(3, 8, 3, padding="same"), lip.GroupSort(2), lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(8, 8, 3, padding="same"), nn.Flatten(), lip.SpectralLinear(128, 3),
    )  # fmt: skip
    x = torch.randn(67, 3, 8, 8)
    other = x.clone()
    other[13] = 1e6 * torch.randn(3, 8, 8)
    seen = []
    for batch in (x, other):
        kept = []
        inputs = batch.requires_grad_()
        flowing = inputs
        for layer in model:
            flowing = layer(flowing)
            flowing.retain_grad()
            kept.append(flowing)
        cotangent = torch.linspace(-1, 1, flowing.numel()).view_as(flowing)
        flowing.backward(cotangent)
        seen.append([inputs.grad, *(each.grad for each in kept), *kept])
    rest = torch.arange(67) != 13
    for one, two in zip(*seen, strict=True):
        assert torch.equal(one[rest], two[rest])
