"""The real data sets, where they are at hand: every value within what is stated of it."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from clipless.data import DataNotFoundError, datasets, load

ROOTS = [
    Path(os.environ["CLIPLESS_DATA"]) if os.environ.get("CLIPLESS_DATA") else None,
    Path(__file__).parents[4] / "shared" / "data",
]


def loaded(name):
    for root in ROOTS:
        if root is not None and root.is_dir():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a copy with other pixels will do
                    return load(name, root=root, download=False)
            except DataNotFoundError:
                continue
    return pytest.skip(f"{name} is not at hand: set CLIPLESS_DATA to a folder that has it")


@pytest.mark.parametrize("name", datasets())
def test_data_is_as_stated(name):
    data = loaded(name)
    info = data.info
    for (x, y), size in ((data.train, info.train_size), (data.test, info.test_size)):
        assert x.dtype == torch.float32
        assert x.shape == (size, *info.example_shape)
        assert y.dtype == torch.int64
        assert y.shape == (size,)
        assert set(y.unique().tolist()) == set(range(len(info.classes)))
        assert torch.isfinite(x).all()
        if info.norm_bound is not None:
            assert x.flatten(1).norm(dim=1).max() <= info.norm_bound


def test_mnist_is_the_original():
    data = loaded("mnist")
    assert data.verified
    assert data.train[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.train[0].mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert data.train[0].flatten().double().std().item() == pytest.approx(0.3081, abs=1e-4)
