from dataclasses import replace

import numpy as np
import pytest

from clipless.sklearn import TabularRule, _fits


@pytest.fixture
def quick(monkeypatch):
    """Fits of a few steps: for tests of everything but how well it learns."""
    choose = TabularRule.choose
    monkeypatch.setattr(
        TabularRule,
        "choose",
        classmethod(lambda cls, **numbers: replace(choose(**numbers), steps=12)),
    )


@pytest.fixture(autouse=True)
def _first_fit(monkeypatch):
    """Every test begins as if nothing had been fitted in this process."""
    monkeypatch.setattr(_fits, "_fits", _fits._Fits())


@pytest.fixture
def table():
    """300 rows whose label is the sign of the first column."""
    x = np.random.default_rng(0).normal(size=(300, 4))
    return x, x[:, 0] > 0
