"""The front end: its constant holds, mirrors do not matter, roots are told from what they are."""

import math

import pytest
import torch

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.errors import UnsupportedOperationError
from clipless.images import ImageFeatures

SHAPE = (3, 8, 8)


def report(front, *, norm=4.0):
    model = torch.nn.Sequential(
        lip.BoundedInput(norm), front, torch.nn.Flatten(),
        lip.SpectralLinear(math.prod(front.output_shape), 4),
    )  # fmt: skip
    return clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=SHAPE)


def found_ratio(front, seed):
    """The largest stretching of a pair of images that gradient ascent finds."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.rand(2, 4, *SHAPE, generator=generator).requires_grad_()
    best = 0.0
    for _ in range(30):
        apart = (front(pair[0]) - front(pair[1])).flatten(1).norm(dim=1)
        ratio = apart / (pair[0] - pair[1]).flatten(1).norm(dim=1)
        best = max(best, ratio.max().item())
        (gradient,) = torch.autograd.grad(ratio.sum(), pair)
        pair = pair + 0.3 * gradient / gradient.flatten(2).norm(dim=2)[..., None, None, None]
        pair = pair.detach().requires_grad_()
    return best


@pytest.mark.parametrize("mirror", [False, True])
def test_constant_holds_and_is_nearly_reached(mirror):
    front = ImageFeatures(SHAPE, mirror=mirror, root=False)
    ratio = max(found_ratio(front, seed) for seed in range(2))
    assert 0.8 < ratio <= front.lipschitz * (1 + 1e-5)
    assert report(front).lipschitz <= front.lipschitz * (1 + 1e-6)


def test_a_root_has_no_constant_but_a_bounded_output():
    front = ImageFeatures(SHAPE, mirror=True, root=True)
    found = report(front)
    assert front.lipschitz == math.inf == found.lipschitz
    # The last layer's gradient is bounded by sqrt(2) times the norm of the features.
    bound = found.gradient_bounds["3.weight"] / math.sqrt(2)
    x = torch.rand(20, *SHAPE)
    x = 4 * x / x.flatten(1).norm(dim=1)[:, None, None, None]
    norms = front(x).flatten(1).norm(dim=1)
    assert 0.2 * bound < norms.max() <= bound


def test_mirror_images_have_the_same_features():
    x = torch.rand(3, *SHAPE)
    front = ImageFeatures(SHAPE, mirror=True, root=True)
    torch.testing.assert_close(front(x), front(x.flip(-1)))
    one_sided = ImageFeatures(SHAPE, mirror=False, root=True)
    assert (one_sided(x) - one_sided(x.flip(-1))).abs().max() > 0.05


def test_edited_filters_are_refused():
    front = ImageFeatures(SHAPE, mirror=True, root=False)
    front.scattering.root.low_rows.mul_(2)
    with pytest.raises(UnsupportedOperationError, match="not the ones"):
        report(front)


def test_compute_is_the_forward_pass_and_exports():
    front = ImageFeatures(SHAPE, mirror=True, root=True)
    x = torch.rand(7, *SHAPE)
    torch.testing.assert_close(front.compute(x, batch_size=3), front(x))
    torch.testing.assert_close(clipless.to_torch(front)(x), front(x))
