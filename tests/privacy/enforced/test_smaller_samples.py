"""A sample without an example is a sample in which it is empty: no other example notices."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless.errors import PrivacyError, UnsupportedOperationError
from tests.privacy.enforced.architectures import KINDS, architecture
from tests.privacy.enforced.runs import EXAMPLES, enforced_run, session_of, sums


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_sums_are_the_same_whether_an_example_is_empty_or_not_there(seed):
    model, draw = architecture(seed)
    for module in model.modules():  # whose masks fall on other examples, with the same chances
        for rate in ("p", "dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    session = session_of(model, draw, thresholds=0.05)
    x, bounds = draw(9), session.plan.sensitivities
    cotangents = torch.randn(9, 3) / session.plan.loss_divisor
    others = torch.arange(9) != 3
    empty = torch.where(others[:, None], cotangents, 0.0)
    there, gone = sums(session, [x], empty), sums(session, [x[others]], cotangents[others])
    for name, bound in bounds.items():
        moved = torch.linalg.vector_norm((there[name] - gone[name]).double())
        assert moved <= 2e-3 * bound, name  # rounding


class Network(nn.Module):
    """An ordinary one, with something in its middle."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.middle = middle
        self.register_buffer("table", torch.randn(EXAMPLES, 8))

    def forward(self, x):
        return self.last(F.relu(self.middle(self, self.first(x))))


def places_instead_of_positions(model, x):
    """The table of positions of a model that has positions on the first axis."""
    return x + model.table[: x.size(0)]


def kept_hidden_state(model, x):
    """What recurrent models for one long text do, in training."""
    before = getattr(model, "state", None)
    if before is None or before.shape != x.shape:
        before = torch.zeros_like(x)
    if model.training:
        model.state = torch.tanh(x + before).detach()
    return x + before


def falling_back(model, x):
    try:
        return x - x.mean(0)
    except Exception:
        return x


MIDDLES = {
    "mean of a batch": lambda model, x: 10 * x / len(x),
    "places": places_instead_of_positions,
    "state": kept_hidden_state,
    "fallback": falling_back,
}


def data():
    return torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,))


@pytest.mark.parametrize("what", MIDDLES)
def test_models_whose_examples_depend_on_the_sample_are_refused(what):
    with pytest.raises(UnsupportedOperationError):
        enforced_run(Network(MIDDLES[what]), data())


@pytest.mark.parametrize("what", ["mean of a batch", "places"])
def test_a_model_that_begins_to_is_caught_by_a_trial(what):
    """By a global, of which no trace knows."""
    changed = []
    model = Network(lambda model, x: MIDDLES[what](model, x) if changed else x)
    engine, optimizer, loader = enforced_run(model, data())
    criterion = engine.session.criterion

    def steps(count):
        for _, (x, y) in zip(range(count), loader, strict=False):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    steps(1)
    changed.append(True)
    with pytest.raises(PrivacyError, match="left out of a batch"):
        steps(4)
