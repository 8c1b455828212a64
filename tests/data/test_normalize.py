"""Norm clipping, normalisation, standardisation."""

import math

import pytest
import torch

from clipless.data import Standardize, clip_norm, normalize
from clipless.nn import BoundedInput


def test_clip_norm_and_normalize_are_the_input_guard():
    x = 3 * torch.randn(50, 3, 4, 4)
    x[0, 0, 0, 0] = math.nan
    assert torch.equal(clip_norm(x, norm=5.0), BoundedInput(5.0)(x))
    norms = normalize(x, norm=2.0).flatten(1).norm(dim=1)
    assert torch.allclose(norms, torch.full((50,), 2.0))
    assert torch.equal(normalize(torch.zeros(2, 3)), torch.zeros(2, 3))
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="norm"):
            clip_norm(x, norm=bad)


@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.1, 0.6, 0.95), (-0.3, 1.4, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardize_is_bounded_and_lipschitz(mean, dtype):
    standardize = Standardize(mean=mean, deviation=(0.25, 0.2, 0.7))
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    x = torch.cat([torch.rand(2000, 3), corners]).to(dtype)[:, :, None, None].expand(-1, -1, 3, 3)
    norms = standardize(x).double().flatten(1).norm(dim=1)
    bound = standardize.norm_bound(pixels=9)
    assert norms.max() <= bound
    assert norms.max() >= bound * (1 - 3e-6)  # met at a corner of the cube
    y = x.flip(0).double()
    moved = (standardize(x.double()) - standardize(y)).flatten(1).norm(dim=1)
    distance = (x.double() - y).flatten(1).norm(dim=1)
    ratio = moved[distance > 0] / distance[distance > 0]
    assert 0.8 * standardize.lipschitz <= ratio.max() <= standardize.lipschitz


def test_standardize_takes_whatever_arrives():
    standardize = Standardize(mean=[0.5], deviation=[0.5])
    x = torch.tensor([math.nan, math.inf, -math.inf, 7.0, 0.5]).view(5, 1, 1, 1)
    assert standardize(x).flatten().tolist() == [-1.0, 1.0, -1.0, 1.0, 0.0]


def test_standardize_refuses_what_it_cannot_bound():
    for mean, deviation in (([0.5], [0.0]), ([0.5], [0.1, 0.1]), ([], []), ([math.nan], [1.0])):
        with pytest.raises(ValueError, match=r"mean|deviation"):
            Standardize(mean=mean, deviation=deviation)
