"""A forward that draws numbers of its own is refused, whatever was drawn, every time."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from clipless import nn as lip
from tests.bounds.refused import Code, guarded, refusal, report_of

OWN_GENERATOR = torch.Generator()


def sometimes(drawn, m, x):
    return x if drawn < 0.5 else m.layers[0](x)


DRAWS = {
    "torch": lambda m, x: sometimes(torch.rand(1), m, x),
    "torch.bernoulli": lambda m, x: sometimes(torch.bernoulli(torch.tensor(0.5)), m, x),
    "torch in place": lambda m, x: sometimes(torch.empty(()).uniform_(), m, x),
    "torch, own generator": lambda m, x: sometimes(torch.rand((), generator=OWN_GENERATOR), m, x),
    "torch, as a factor": lambda m, x: m.layers[0](x) * float(torch.rand(())),
    "torch, as a tensor": lambda m, x: m.layers[0](x) * torch.rand(4),
    "torch, of the input's size": lambda m, x: m.layers[0](x) * torch.rand(x.shape[1:]),
    "torch, of the batch's size": lambda m, x: m.layers[0](x) * torch.rand(x.shape[0], 1),
    "torch, like the input": lambda m, x: m.layers[0](x) * torch.rand_like(x),
    "random": lambda m, x: sometimes(random.random(), m, x),
    "random.choice": lambda m, x: random.choice([x, m.layers[0](x)]),
    "numpy": lambda m, x: sometimes(np.random.rand(), m, x),
    "numpy.random.randint": lambda m, x: sometimes(np.random.randint(2), m, x),
}


def model_of(line):
    return guarded(Code(line, lip.SpectralLinear(4, 4)), lip.SpectralLinear(4, 2))


@pytest.mark.parametrize("name", DRAWS)
def test_forwards_that_draw_are_refused_every_time(name):
    """Stochastic depth was accepted, with the bound of one draw, in half of all runs."""
    for _ in range(12):
        refusal(model_of(DRAWS[name]))


@pytest.mark.parametrize("source", ["torch", "random", "numpy"])
def test_the_refusal_names_the_generator_and_the_remedy(source):
    message = refusal(model_of(DRAWS[source]))
    assert "draws random numbers" in message
    assert source in message.split("(from ")[1]
    assert "torch.nn.Dropout" in message


def test_dropout_and_quiet_models_move_no_generator():
    model = guarded(nn.Dropout(0.3), lip.SpectralLinear(4, 2))
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    report_of(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[2])


def test_draws_of_other_threads_are_not_those_of_the_forward():
    stop = threading.Event()

    def draw():
        while not stop.wait(0.01):
            torch.rand(1), random.random(), np.random.rand()

    other = threading.Thread(target=draw)
    other.start()
    try:
        for _ in range(30):
            report_of(model_of(lambda m, x: m.layers[0](x)))
            refusal(model_of(DRAWS["random"]))
    finally:
        stop.set()
        other.join()


def test_a_model_that_draws_at_its_construction_is_admitted():
    report_of(model_of(lambda m, x: m.layers[0](x)))
