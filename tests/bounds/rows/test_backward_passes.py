"""Backward passes are autograd's own: none of them lets examples meet by looking at their values.

A trace follows forward passes. Some of torch's formulas for derivatives take another way if any
entry of the batch is a zero, say: then one example decides how the others are rounded, or whether
they overflow. Operators with such a formula are refused where a gradient flows.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from clipless.bounds import Rows, RowTrace, trace_rows
from clipless.errors import UnsupportedOperationError
from clipless.privacy import EnforcedBounds
from tests.privacy.enforced.runs import enforced_run

BATCH = 5
LOOKS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero",
         "aten::equal", "aten::masked_select", "aten::unique"}  # fmt: skip
OWN = torch.zeros(BATCH, 4).long()

FUNCTIONS = {
    "sums": lambda x: x.sum(1) + x.mean(1) + x.nansum(1) + x.logsumexp(1) + x.norm(dim=1),
    "norms": lambda x: x.norm(p=1, dim=1) + torch.linalg.vector_norm(x, ord=3, dim=1),
    "largest norm": lambda x: torch.linalg.vector_norm(x, ord=torch.inf, dim=1),
    "spreads": lambda x: x.std(1) + x.var(1, unbiased=False) + torch.var_mean(x, 1)[0],
    "orders": lambda x: x.sort(1)[0][:, 0] + x.median(1)[0] + x.kthvalue(2, 1)[0] + x.mode(1)[0],
    "extremes": lambda x: x.amax(1) + x.min(1)[0] + torch.aminmax(x, dim=1)[0],
    "largest": lambda x: x.topk(2, 1)[0][:, 0],
    "running": lambda x: x.cumsum(1) + x.logcumsumexp(1) + x.cummax(1)[0],
    "softmax": lambda x: x.softmax(1) + x.log_softmax(1) + F.glu(torch.cat([x, x], 1), 1),
    "places": lambda x: x.gather(1, x.argsort(1)) + x[:, [1, 0, 3, 2]] + x.index_select(1, OWN[0]),
    "own place": lambda x: x[torch.arange(BATCH), x.argmax(1)],
    "written": lambda x: torch.zeros_like(x).scatter(1, OWN, x).scatter_add(1, OWN, x),
    "reduced": lambda x: sum(
        torch.zeros_like(x).scatter_reduce(1, OWN, x, how)
        for how in ("sum", "mean", "amax", "amin", "prod")
    ),
    "entries": lambda x: x.pow(2.5) + x.abs() ** x + torch.atan2(x, x + 1) + torch.hypot(x, x)
    + torch.xlogy(x, x.abs()) + torch.logaddexp(x, 2 * x) + torch.sinc(x) + torch.lerp(x, 2 * x, x),
    "chosen": lambda x: torch.where(x > 0, x, 0 * x) + x.masked_fill(x > 0, 0) + x.clamp(min=0 * x)
    + torch.maximum(x, 2 * x) + torch.fmax(x, 2 * x),
    "activations": lambda x: F.gelu(x) + F.celu(x) + F.prelu(x, torch.ones(4)) + F.softplus(x),
    "products": lambda x: (x.view(BATCH, 2, 2) @ x.view(BATCH, 2, 2).mT).flatten(1)
    + x @ x.new_ones(4, 4),
    "normalised": lambda x: F.layer_norm(x, [4]) + F.rms_norm(x, [4]) + F.group_norm(x, 2)
    + F.batch_norm(x, torch.zeros(4), torch.ones(4)) + F.normalize(x),
    "instances": lambda x: F.instance_norm(x.view(BATCH, 2, 2)),
    "convolved": lambda x: F.conv1d(x.view(BATCH, 1, 4), torch.ones(2, 1, 2)),
    "pooled": lambda x: F.max_pool1d(x.unsqueeze(1), 2) + F.avg_pool1d(x.unsqueeze(1), 2)
    + F.adaptive_max_pool1d(x.unsqueeze(1), 2),
    "resized": lambda x: F.interpolate(x.view(BATCH, 1, 4), scale_factor=2, mode="linear"),
    "padded": lambda x: F.pad(x.view(BATCH, 1, 4), (1, 1), mode="reflect"),
    "windows": lambda x: F.fold(F.unfold(x.view(BATCH, 1, 2, 2), 2), (2, 2), 2).flatten(1),
    "sampled": lambda x: F.grid_sample(
        x.view(BATCH, 1, 2, 2), x.view(BATCH, 2, 2).tanh().unsqueeze(1), align_corners=False
    ),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(BATCH, 1, 2, 2)] * 3, attn_mask=torch.ones(BATCH, 1, 2, 2) > 0
    ),
    "arranged": lambda x: x.view(BATCH, 2, 2).diagonal(dim1=1, dim2=2) + x.roll(1, 1).flip(1)[:, :2]
    + x.unfold(1, 2, 1)[:, 0] + x.view(BATCH, 2, 2).tril()[:, 1],
    "complex": lambda x: torch.view_as_real(torch.complex(x, x)).sum((1, 2))
    + torch.polar(x, x).abs().sum(1),
    "dropout": lambda x: F.dropout(x, 0.5) + F.alpha_dropout(x, 0.5, True),
}  # fmt: skip


def looks(functions):
    """Which looks at values the backward passes of functions take, as they really run."""
    losses = []
    for function in functions:
        x = torch.rand(BATCH, 4) + 0.5
        x[0, 1] = 0.0
        losses.append((function(x.requires_grad_()).sum(), x))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for loss, x in losses:
            torch.autograd.grad(loss, x)
    return {event.name for event in found.events()} & LOOKS


def test_no_backward_pass_looks_at_values():
    assert not looks(FUNCTIONS.values())


def test_the_search_finds_products():
    assert looks([lambda x: x.prod(1)])
    assert looks([lambda x: x.cumprod(1)])


@pytest.mark.parametrize("function", [lambda x: x.prod(1), lambda x: x.cumprod(1)])
def test_products_are_refused_where_they_are_differentiated(function):
    x, trace = torch.randn(BATCH, 4), RowTrace(BATCH)
    trace_rows(lambda: trace.rows(function(x)), [x], trace)
    assert trace.rows(x) == Rows(0)
    leaf = x.clone().requires_grad_()
    with pytest.raises(UnsupportedOperationError, match="has a zero in them"):
        trace_rows(lambda: function(leaf * 2), [leaf], RowTrace(BATCH))


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(1, 3)

    def forward(self, x):
        return self.last(self.first(x).prod(1, keepdim=True) * 1e-12)


def test_a_network_of_products_is_refused():
    """A zero in one example took away all others' contributions, seven sensitivities in all."""
    data = torch.rand(40, 4), torch.zeros(40).long()
    with pytest.raises(UnsupportedOperationError, match="has a zero in them"):
        enforced_run(Products(), data, bounds=EnforcedBounds(thresholds=0.05))
