"""Shared test set-up: every test starts from the same seed, and hypothesis from a fixed one.

Noise and samples come from the operating system's entropy, which no seed reaches. In tests a
generator that is seeded with the test's name stands in for it, so that a statistical claim which
holds today holds tomorrow; processes that a test starts draw fresh ones, as everybody's do.
`make fuzz` draws the examples of hypothesis anew, and many more of them, and leaves the entropy
as it is.
"""

import os
import random
import secrets
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


_entropy = (secrets.randbits, secrets.token_bytes)


def _fresh_entropy() -> None:
    secrets.randbits, secrets.token_bytes = _entropy


os.register_at_fork(after_in_child=_fresh_entropy)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the entropy before the fixtures of the test draw from it."""
    if os.environ.get("CLIPLESS_TEST_ENTROPY") != "fresh":
        source = random.Random(item.nodeid)
        vars(secrets).update(
            randbits=source.getrandbits, token_bytes=lambda count=32: source.randbytes(count)
        )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Nothing that other tests compiled is known, and nothing of this one is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
