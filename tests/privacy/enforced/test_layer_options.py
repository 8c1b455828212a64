"""Layers with all their options compute what they do by themselves, with gradients of their own."""

import itertools

import pytest
import torch
from torch import nn

from clipless.privacy import EnforcedBounds
from tests.privacy.enforced.runs import enforced_run, plain_gradients, sums


class Attends(nn.Module):
    def __init__(self, attention, *, apart=False, masks=True, weights=False):
        super().__init__()
        self.attention, self.head = attention, nn.Linear(attention.embed_dim, 3)
        self.apart, self.masks, self.weights = apart, masks, weights

    def forward(self, x):
        first = self.attention.batch_first
        keys = torch.tanh(x) if self.apart else x
        keys = x if first and not self.apart else keys
        padding = x[:, :, 0] > 1.5 if self.masks else None
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        q, k = (x, keys) if first else (x.transpose(0, 1), keys.transpose(0, 1))
        found, weights = self.attention(
            q, k, k, key_padding_mask=padding, attn_mask=causal if self.masks else None,
            need_weights=self.weights,
        )  # fmt: skip
        found = found if first else found.transpose(0, 1)
        found = found + weights.mean(-1, keepdim=True) if self.weights else found
        return self.head(torch.nan_to_num(found).mean(1))


class Remembers(nn.Module):
    def __init__(self, body, width):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, x):
        found, state = self.body(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(found.mean(1)) + last.sum(dim=(0, 2)).unsqueeze(1)


ATTENTION = [
    {"add_bias_kv": more, "add_zero_attn": zero, "bias": bias, "batch_first": first}
    for more, zero, bias, first in itertools.product((False, True), repeat=4)
    if more or zero
]
RECURRENT = [
    (nn.LSTM(4, 5, proj_size=2, batch_first=True), 2),
    (nn.LSTM(4, 5, 2, proj_size=3, bidirectional=True, batch_first=True, bias=False), 6),
    (nn.GRU(4, 5, bias=False, batch_first=True), 5),
    (nn.RNN(4, 5, 2, nonlinearity="relu", batch_first=True), 5),
]


def check(model):
    """Without clipping, the sums are the model's own; with it, each example keeps to its bound."""
    torch.manual_seed(1)
    x = torch.randn(6, 5, 4)
    data, cotangents = (torch.randn(20, 5, 4), torch.zeros(20).long()), torch.randn(6, 3)
    for threshold in (1e6, 1e-3):
        session = enforced_run(model, data, bounds=EnforcedBounds(thresholds=threshold))[0].session
        found = sums(session, [x], cotangents)
        if threshold > 1:
            for name, own in plain_gradients(model, x, cotangents).items():
                torch.testing.assert_close(
                    found[name].float(), own.sum(0), rtol=1e-3, atol=1e-4, msg=name
                )  # fmt: skip
        for row in range(len(x)):
            alone = torch.zeros_like(cotangents)
            alone[row] = 1e3 * cotangents[row]
            for name, sum_of in sums(session, [x], alone).items():
                size = torch.linalg.vector_norm(sum_of.double())
                assert size <= session.plan.sensitivities[name], name
        session.detach()


@pytest.mark.parametrize("options", ATTENTION, ids=str)
def test_attention(options):
    torch.manual_seed(0)
    apart = options["bias"]
    check(Attends(nn.MultiheadAttention(4, 2, **options), apart=apart, weights=apart))


def test_attention_with_keys_of_another_width():
    class Widened(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(
                4, 2, kdim=3, vdim=2, add_bias_kv=True, add_zero_attn=True, batch_first=True
            )
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.attention(x, x[..., :3], x[..., :2])[0].mean(1))

    torch.manual_seed(0)
    check(Widened())


@pytest.mark.parametrize("case", range(len(RECURRENT)))
def test_recurrent_layers(case):
    torch.manual_seed(0)
    check(Remembers(*RECURRENT[case]))
