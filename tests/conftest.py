"""Shared test set-up: every test starts from the same seed, and hypothesis from a fixed one.

`make fuzz` draws the examples of hypothesis anew, and many more of them.
"""

import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("fuzz", deadline=None, max_examples=1000)
settings.load_profile("default")

# Shells start what runs in the background deaf to Ctrl-C, and so would be all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nearly all tensors here are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Nothing that other tests compiled is known, and nothing of this one is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
