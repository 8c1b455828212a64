"""Compilers and accelerators, as far as tests without them can have them."""

import pytest
import torch

from clipless.privacy._session import TrainingSession


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def accelerated(monkeypatch):
    """As on a GPU: the criterion is compiled as well."""
    monkeypatch.setattr(TrainingSession, "on_accelerator", property(lambda session: True))
