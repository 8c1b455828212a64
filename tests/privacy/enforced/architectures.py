"""Ordinary networks of all kinds, small, and drawn at random: a seed gives one of them."""

import random

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 3


def _images(count, size=6, channels=3):
    return torch.randn(count, channels, size, size)


def _sequences(count, length=5, features=6):
    return torch.randn(count, length, features)


def _tokens(count, length=6):
    return torch.randint(0, 9, (count, length))


class Pooled(nn.Module):
    """A body, its mean over positions, and a linear head."""

    def __init__(self, body, width):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.body(x)
        x = x[0] if isinstance(x, tuple) else x
        return self.head(x.flatten(1, -2).mean(1) if x.ndim > 2 else x)


def mlp(rng):
    width = rng.choice([4, 8])
    norm = rng.choice([nn.LayerNorm, nn.RMSNorm])(width)
    return nn.Sequential(
        nn.Linear(6, width, bias=rng.random() < 0.5), norm, rng.choice([nn.ReLU, nn.GELU])(),
        nn.Linear(width, CLASSES),
    ), lambda count: torch.randn(count, 6)  # fmt: skip


def cnn(rng):
    width = rng.choice([4, 8])
    norm = rng.choice([nn.GroupNorm(2, width), nn.InstanceNorm2d(width, affine=True)])
    conv = nn.Conv2d(
        3, width, rng.choice([1, 2, 3]), stride=rng.choice([1, 2]), padding=rng.choice([0, 1]),
        dilation=rng.choice([1, 2]), padding_mode=rng.choice(["zeros", "reflect", "circular"]),
    )  # fmt: skip
    return nn.Sequential(
        conv, norm, nn.ReLU(), nn.Conv2d(width, width, 1, groups=2),
        nn.MaxPool2d(2, ceil_mode=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, CLASSES),
    ), _images  # fmt: skip


def decoder(rng):
    kind = rng.choice([1, 2, 3])
    up = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[kind]
    down = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[kind]
    pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[kind]
    return nn.Sequential(
        up(2, 4, 2, stride=2, output_padding=rng.choice([0, 1])), nn.SiLU(),
        down(4, 4, 2, padding="same"), pool(1), nn.Flatten(), nn.Linear(4, CLASSES),
    ), lambda count: torch.randn(count, 2, *[3] * kind)  # fmt: skip


def encoder(rng):
    layer = nn.TransformerEncoderLayer(
        6, 2, 8, dropout=0.0, batch_first=True, norm_first=rng.random() < 0.5
    )
    return Pooled(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), 6), _sequences


class Cross(nn.Module):
    """Learned queries attend to the input; separate projections."""

    def __init__(self, bias, **options):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, 6))
        self.attention = nn.MultiheadAttention(
            6, 2, kdim=4, vdim=4, bias=bias, batch_first=True, **options
        )
        self.key, self.head = nn.Linear(6, 4), nn.Linear(6, CLASSES)

    def forward(self, x):
        keys = self.key(x)
        found, _ = self.attention(self.queries.expand(len(x), -1, -1), keys, keys)
        return self.head(found.mean(1))


def cross(rng):
    more, zero = rng.random() < 0.5, rng.random() < 0.5
    return Cross(rng.random() < 0.5, add_bias_kv=more, add_zero_attn=zero), _sequences


class Vision(nn.Module):
    """Patches, a class token, positions and scales that stand alone."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 9, 8) * 0.3)
        self.scale = nn.Parameter(torch.ones(8))
        self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.positions[:, : x.shape[1]]
        return self.head(self.block(x * self.scale.exp())[:, 0])


def vision(rng):
    return Vision(), _images


def recurrent(rng):
    kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    both = rng.random() < 0.5
    options = {"proj_size": 3} if kind is nn.LSTM and rng.random() < 0.5 else {}
    body = kind(
        6, 4, num_layers=rng.choice([1, 2]), bidirectional=both, batch_first=True, **options
    )
    width = options.get("proj_size", 4)
    return Pooled(body, 2 * width if both else width), _sequences


class Text(nn.Module):
    """Tokens, positions by their numbers, and a tied head."""

    def __init__(self, padding):
        super().__init__()
        self.words = nn.Embedding(9, 6, padding_idx=padding)
        self.places = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(torch.tanh(self.norm(x)).sum(1))


def text(rng):
    return Text(rng.choice([None, 0])), _tokens


def bag(rng):
    return nn.Sequential(
        nn.EmbeddingBag(9, 6, mode=rng.choice(["sum", "mean"])), nn.ReLU(), nn.Linear(6, CLASSES)
    ), _tokens  # fmt: skip


class Adapter(nn.Module):
    """A low-rank correction of a frozen linear layer."""

    def __init__(self, size):
        super().__init__()
        self.frozen = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x):
        return self.frozen(x) + 2.0 * self.up(self.down(x))


def adapters(rng):
    head = nn.Linear(6, CLASSES)
    body = nn.Sequential(Adapter(6), nn.GELU(), Adapter(6))
    return nn.Sequential(body, Pooled(nn.Identity(), 6)) if rng.random() < 0.5 else nn.Sequential(
        body, nn.Flatten(), nn.Linear(30, 6), head
    ), _sequences  # fmt: skip


class Tied(nn.Module):
    """One layer used several times, one table that is also a head, one bare matrix."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.again = nn.Linear(6, 6)
        self.matrix = nn.Parameter(torch.randn(CLASSES, 9) / 3)
        self.shift = nn.Parameter(torch.zeros(CLASSES))
        self.back = nn.Linear(6, 9, bias=False)
        self.back.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        x = self.again(torch.tanh(self.again(x)))
        return F.linear(self.back(x).mean(1), self.matrix) + self.shift


def tied(rng):
    return Tied(), _tokens


class Second(nn.Module):
    """Layers that see positions and examples on one axis, and the batch second."""

    def __init__(self):
        super().__init__()
        self.flat, self.across, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        batch, length, _ = x.shape
        x = self.flat(x.reshape(batch * length, 6)).view(batch, length, 6)
        x = x.transpose(0, 1)
        x = self.norm(x + self.across(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.flat(x.reshape(length * batch, 6))).view(length, batch, 6)
        return self.head(x.mean(0))


def second(rng):
    return Second(), _sequences


KINDS = (
    mlp, cnn, decoder, encoder, cross, vision, recurrent, text, bag, adapters, tied, second,
)  # fmt: skip


def architecture(seed):
    """A model and a function that draws so many examples for it."""
    torch.manual_seed(seed)
    return KINDS[seed % len(KINDS)](random.Random(seed))
