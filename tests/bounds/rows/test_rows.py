"""The batch axis is followed through operators: what keeps examples apart passes, nothing else."""

import io
import itertools

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from clipless import bounds
from clipless.bounds import Rows, RowTrace, trace_rows
from clipless.bounds.rows._layout import reshaped
from clipless.errors import UnsupportedOperationError

BATCH = 5


def traced(function, *shape, integers=False):
    torch.manual_seed(0)
    x = torch.randint(0, 2, (BATCH, *shape)) if integers else torch.randn(BATCH, *shape)
    trace, found = RowTrace(BATCH), []
    trace_rows(lambda: found.append(function(x)) or found, [x], trace)
    return trace.rows(found[0]), found[0], x


def filled(x):
    empty = torch.zeros(x.shape[0], 4)
    empty[:, 0] = x[:, 0]
    return empty


def stateful(x):
    return x * torch.zeros(4).copy_(x.sum(0) * 0 + 1)


def looped(x):
    return torch.stack([each * 2 for each in x])


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.mean(0, keepdim=True).expand_as(cotangent)


MIXING = {
    "mean over the batch": lambda x: x - x.mean(0),
    "mean over everything": lambda x: x - x.mean(),
    "norm of everything": lambda x: x / x.norm(),
    "maximum over the batch": lambda x: x / x.amax(0),
    "softmax along the batch": lambda x: x.softmax(0),
    "sort of the batch": lambda x: x.sort(0)[0],
    "running sum": lambda x: x.cumsum(0),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "rolled flat": lambda x: x.roll(1),
    "rolled flat, examples on the second axis": lambda x: x.t().roll(1).t(),
    "complex numbers of pairs": lambda x: torch.view_as_real(
        torch.complex(x, torch.zeros(BATCH, 1, 4))
    ).sum((1, 3)),
    "median of what was expanded": lambda x: x.unsqueeze(0).expand(2, BATCH, 4).median(0)[0],
    "the neighbour": lambda x: x + torch.cat([x[1:], x[:1]]),
    "one for all": lambda x: x + x[0],
    "pairwise": lambda x: torch.cdist(x, x),
    "attention over the batch": lambda x: (x @ x.T).softmax(1) @ x,
    "product of sums": lambda x: torch.einsum("bi,bj->ij", x, x),
    "diagonal": lambda x: x.unsqueeze(0) * x.unsqueeze(1),
    "reshaped": lambda x: x.reshape(4, BATCH).t(),
    "transposed and reshaped": lambda x: x.t().reshape(BATCH, 4),
    "cut": lambda x: x.view(2, -1),
    "permuted": lambda x: x[torch.randperm(BATCH)],
    "sorted by value": lambda x: x[x.sum(1).argsort()],
    "gathered": lambda x: x.gather(0, (x > 0).long()),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(0, (x > 0).long(), x),
    "a mask of values": lambda x: x[x > 0],
    "a decision": lambda x: x if bool((x[:, 0] > 0).all()) else -x,
    "a number": lambda x: x * float(x.abs().max()),
    "written into a part": filled,
    "left in a constant": stateful,
    "one at a time": looped,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm with memory": lambda x: F.batch_norm(
        x, torch.zeros(4), torch.ones(4), training=True
    ),
    "a backward pass of its own": lambda x: Doubles.apply(x.requires_grad_()),
    "an unknown operator": lambda x: torch.linalg.svdvals(x),
    "repeated": lambda x: x.repeat(2, 1)[:BATCH],
    "convolved": lambda x: F.conv1d(x.t().unsqueeze(0), torch.ones(4, 4, 3), padding=1)[0].t(),
    "padded": lambda x: F.pad(x, (0, 0, 1, 0)),
    "attention with the batch as sequence": lambda x: F.scaled_dot_product_attention(
        x.view(1, 1, BATCH, 4), x.view(1, 1, BATCH, 4), x.view(1, 1, BATCH, 4)
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_is_refused_by_name(name):
    with pytest.raises(UnsupportedOperationError, match=r"aten|autograd function|written into"):
        traced(MIXING[name], 4)


def with_hook(x):
    doubled = x.requires_grad_() * 2
    doubled.register_hook(lambda gradient: gradient / gradient.norm())
    return doubled


def with_hook_on_a_node(x):
    doubled = x.requires_grad_() * 2
    doubled.grad_fn.register_prehook(lambda gradients: (gradients[0] / gradients[0].norm(),))
    return doubled


def with_other_activations(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * x.mean()):
        return x.requires_grad_().exp()


def saved(x):
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return x * torch.load(file).mean()


ESCAPES = {
    "a list": lambda x: x - torch.tensor(x.tolist()).mean(),
    "numpy": lambda x: x - float(x.detach().numpy().mean()),
    "an array": lambda x: x - float(np.asarray(x).mean()),
    "storage": lambda x: x - sum(x.untyped_storage().tolist()),
    "python's own function": lambda x: x - x.clone().apply_(lambda entry: entry).mean(),
    "a file": saved,
    "a hook": with_hook,
    "a hook on a node": with_hook_on_a_node,
    "a hook on activations": with_other_activations,
}


@pytest.mark.parametrize("name", ESCAPES)
def test_what_a_trace_of_operators_does_not_see_is_refused(name):
    with pytest.raises(UnsupportedOperationError, match=r"Tensor\.\w+|saved_tensors_hooks"):
        traced(ESCAPES[name], 4)


def test_what_holds_nothing_of_examples_may_be_read():
    """Numbers and arrays of constants and shapes; and torch's own checkpoints of activations."""

    def layer(x):
        steps = torch.arange(4.0)
        x = x * sum(steps.tolist()) + float(steps.numpy()[1])
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)

    assert traced(layer, 4)[0] == Rows(0)


APART = {
    "complex and back": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(BATCH, 2, 2)) * torch.polar(torch.ones(2), torch.ones(2))
    ).flatten(1),
    "own smallest": lambda x: x.t().kthvalue(1, 0)[0].unsqueeze(1),
    "entry by entry": lambda x: torch.where(x > 0, x.exp(), -x) * torch.arange(4),
    "own mean": lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
    "own order": lambda x: x.sort(1)[0].flip(1).roll(1, 1).cumsum(1).softmax(1),
    "own argmax": lambda x: torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), 1.0) * x,
    "products": lambda x: x @ torch.ones(4, 3) @ torch.ones(3, 2),
    "second axis and back": lambda x: (torch.ones(2, 4) @ x.t()).t(),
    "flat and back": lambda x: x.flatten().view(-1, 2).relu().view(BATCH, 4),
    "beside each other": lambda x: torch.cat([x, x * 2, torch.ones(BATCH, 1)], 1),
    "on another axis": lambda x: torch.stack([x, x], 0).transpose(0, 1),
    "read at own places": lambda x: x[torch.arange(BATCH), x.argmax(1)].unsqueeze(1),
    "dropped": lambda x: F.dropout(F.alpha_dropout(x, 0.5), 0.5),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 3, -1).sum(1),
    "einsum": lambda x: torch.einsum("bi,ij,bj->b", x, torch.ones(4, 4), x),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "into a new tensor": lambda x: torch.zeros_like(x).copy_(x),
    "pieces": lambda x: torch.cat([p * i for i, p in enumerate(x.split([1, 3], 1))], 1),
    "known statistics": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "scaled positions": lambda x: F.rms_norm(x, [4]) + F.layer_norm(x, [4]),
    "windows": lambda x: x.unfold(1, 2, 1).amax(2),
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_examples_apart_passes_and_does(name):
    rows, output, x = traced(APART[name], 4)
    assert rows == Rows(0)
    if name == "dropped":
        return
    other = x.detach().clone()
    other[2] = torch.randn(4) * 3
    torch.manual_seed(0)
    moved = APART[name](other) - output
    assert moved[[0, 1, 3, 4]].abs().max() == 0


def test_images_and_instance_normalisation():
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2),
        nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    assert traced(layers, 3, 8, 8)[0] == Rows(0)
    with pytest.raises(UnsupportedOperationError, match="keeps, statistics of the batch"):
        traced(nn.InstanceNorm2d(3, track_running_stats=True), 3, 8, 8)


def test_reshapes_are_followed_exactly():
    """Compared with tensors that hold the number of each entry's example."""
    batch = 3
    for old in itertools.product([1, 2, 3, 4], repeat=3):
        for axis in range(3):
            for inner in (1, 2):
                shape = list(old)
                shape[axis] = batch * inner
                numbers = torch.arange(batch).repeat_interleave(inner)
                held = numbers.view(-1, *[1] * (2 - axis)).expand(shape).contiguous()
                for new in {
                    (held.numel(),),
                    (batch, -1),
                    (-1, batch),
                    (2, -1),
                    (-1, 2),
                    (-1, 3, 2),
                }:
                    try:
                        seen = held.reshape(new)
                    except RuntimeError:
                        continue
                    found = reshaped(Rows(axis, 1, inner), batch, shape, seen.shape)
                    if found is not None:
                        numbers = torch.arange(batch).repeat_interleave(found.inner)
                        numbers = numbers.repeat(found.outer)
                        wide = numbers.view(-1, *[1] * (seen.ndim - 1 - found.axis))
                        assert torch.equal(wide.expand(seen.shape), seen)


def test_a_rule_of_ones_own():
    with pytest.raises(UnsupportedOperationError, match=r"@clipless\.bounds\.register_rows"):
        traced(lambda x: torch.linalg.matrix_exp(x), 3, 3)

    @bounds.register_rows(torch.ops.aten.linalg_matrix_exp)
    def one_by_one(call):
        return call.rows(call.args[0])

    try:
        assert traced(lambda x: torch.linalg.matrix_exp(x), 3, 3)[0] == Rows(0)
    finally:
        bounds.unregister_rows(torch.ops.aten.linalg_matrix_exp)


def test_an_operator_of_ones_own_inherits_no_rule_by_its_name():
    own = torch.library.Library("clipless_tests", "DEF")
    own.define("exp(Tensor x) -> Tensor")
    own.impl("exp", lambda x: x - x.mean(dim=0), "CompositeExplicitAutograd")
    traced(torch.ops.aten.exp, 4)
    with pytest.raises(UnsupportedOperationError, match=r"clipless_tests\.exp .*there is no rule"):
        traced(torch.ops.clipless_tests.exp, 4)
