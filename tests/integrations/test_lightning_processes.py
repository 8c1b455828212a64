"""Lightning in two processes: one sample, one noise, one set of weights."""

import pytest
import torch

from clipless.integrations import PrivateStrategy
from clipless.ledger import Ledger
from tests.integrations.lightning_runs import (
    Classifier,
    callback,
    loader,
    plain_loop,
    trainer,
    weights,
)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    """Without noise, which each process draws for its own parameters, the weights are the same."""
    module = Classifier()
    own = callback(noise_multiplier=0.0, ledger=tmp_path / "ledger.jsonl")
    made = trainer(own, devices=2, strategy=PrivateStrategy(start_method="fork"))
    made.fit(module, loader())
    assert Ledger(tmp_path / "ledger.jsonl").releases == 12
    expected = plain_loop(steps=12, noise_multiplier=0.0)
    for name, weight in weights(module).items():
        torch.testing.assert_close(weight, expected[name])
