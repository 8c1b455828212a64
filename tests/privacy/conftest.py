"""Accelerators, as far as tests without them can have them."""

import pytest

from clipless.privacy import TrainingSession


@pytest.fixture
def accelerated(monkeypatch):
    """As on a GPU: the criterion is compiled as well."""
    monkeypatch.setattr(TrainingSession, "on_accelerator", property(lambda session: True))
