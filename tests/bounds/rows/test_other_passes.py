"""What an example becomes depends neither on how many others there are, nor on earlier batches."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless.bounds import RowTrace, compare_passes, trace_rows
from clipless.errors import UnsupportedOperationError

TABLE = torch.randn(64, 4)


def passes(function):
    """Trace three passes, in batches of two sizes, and compare them."""
    traces = []
    for batch in (7, 5, 5):
        torch.manual_seed(0)
        x = torch.randn(batch, 3, 4)
        trace = RowTrace(batch, earlier=traces)
        trace_rows(lambda x=x: function(x), [x], trace)
        traces.append(trace)
    for other in traces[1:]:
        compare_passes(traces[0].calls, other.calls, (7, other.batch))


class Remembers:
    """Adds what the batch before has left, where it fits."""

    def __init__(self):
        self.state = None

    def __call__(self, x):
        before, self.state = self.state, x.tanh()
        return x if before is None or before.shape != x.shape else x + before


class Replaces:
    """Keeps a memory that has all sizes from the beginning."""

    def __init__(self):
        self.states = {batch: torch.zeros(batch, 3, 4) for batch in (5, 7)}

    def __call__(self, x):
        y = x + self.states[len(x)]
        self.states[len(x)] = 0.5 * y
        return y


class Counts:
    """Divides by the number of all examples so far."""

    def __init__(self):
        self.seen = 0

    def __call__(self, x):
        self.seen += len(x)
        return x / self.seen


def swallowed(x):
    try:
        return x - x.mean(0)
    except Exception:
        return x


DEPEND = {
    "on the number of examples": lambda x: x / len(x),
    "on a tensor of it": lambda x: x * torch.tensor(1.0 / len(x)),
    "on the sum of ones": lambda x: x / torch.ones(len(x), 1, 1).sum(),
    "on ones over their number": lambda x: x * (torch.ones(len(x), 3, 4) / len(x)),
    "on their places": lambda x: x + torch.arange(len(x)).view(-1, 1, 1),
    "on a table by place": lambda x: x + TABLE[: len(x)].unsqueeze(1),
    "on a product by place": lambda x: torch.bmm(x, TABLE[: 4 * len(x)].view(-1, 4, 4)),
    "on entries by place": lambda x: x.gather(1, torch.arange(len(x)).view(-1, 1, 1) % 3),
    "on what is joined by place": lambda x: torch.cat([x, TABLE[: len(x)].unsqueeze(1)], 1),
    "on places after a reshape": lambda x: x.flatten(0, 1) + TABLE[: 3 * len(x)],
    "on how much of itself is read": lambda x: x.flatten(1)[:, : len(x)].sum(1),
    "on an exponent": lambda x: x.abs().pow(len(x)),
    "on a padding": lambda x: F.pad(x, (0, len(x))).sum(2),
    "on an earlier batch": Remembers(),
    "on a memory": Replaces(),
    "on a count": Counts(),
    "on all, where refusals are caught": swallowed,
}


@pytest.mark.parametrize("how", DEPEND)
def test_what_would_change_with_a_smaller_sample_is_refused(how):
    with pytest.raises(UnsupportedOperationError, match=r"aten|other size"):
        passes(DEPEND[how])


def dropped_paths(x):
    """Stochastic depth, example by example, as common libraries write it."""
    kept = x.new_empty(len(x), 1, 1).bernoulli_(0.7).div_(0.7)
    return x + kept * x.tanh()


def with_a_state(x):
    """A recurrent state that begins with zeros."""
    state = torch.zeros(len(x), 4)
    for step in range(x.shape[1]):
        state = torch.tanh(state + x[:, step])
    return state


INDEPENDENT = {
    "sizes": lambda x: x.reshape(len(x), -1).view(len(x) * 3, 4).unflatten(0, (len(x), 3)),
    "positions": lambda x: x + torch.arange(3).view(1, 3, 1) + torch.ones(4).expand(len(x), 3, 4),
    "own places": lambda x: x[torch.arange(len(x)), x.sum(2).argmax(1)],
    "masks": lambda x: x.masked_fill(torch.ones(len(x), 3, 3).tril()[..., :1] == 0, -1e9),
    "infinite masks": lambda x: x + torch.full((len(x), 3, 4), -torch.inf).triu(1),
    "a matrix for all": lambda x: x @ TABLE[:4] @ TABLE[:4].expand(len(x), 4, 4),
    "noise": lambda x: x + torch.randn_like(x) + torch.randn(len(x), 3, 4) * 2,
    "dropped paths": dropped_paths,
    "dropout": nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.2)),
    "a random slope": lambda x: F.rrelu(x, training=True),
    "a random number for all": lambda x: x * torch.rand(()) * random.Random(0).random(),
    "a state": with_a_state,
    "its own statistics": lambda x: F.group_norm(x.mT, 2) + F.instance_norm(x.mT),
    "means over its own axes": lambda x: x.mean((1, 2)) / x.shape[1],
}  # fmt: skip


@pytest.mark.parametrize("what", INDEPENDENT)
def test_what_every_example_meets_alike_passes(what):
    passes(INDEPENDENT[what])
