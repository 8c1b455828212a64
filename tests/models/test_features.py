"""Features of a frozen backbone: right, and refused where examples are not kept apart."""

import pytest
import torch
from torch import nn

from clipless import models
from clipless.errors import PrivacyError


def backbone():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
    )
    network(torch.randn(32, 1, 6, 6))  # batch statistics that are not the initial ones
    return network.eval()


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_features_are_those_of_each_example_alone(count, batch_size):
    network, x = backbone(), torch.randn(count, 1, 6, 6)
    features = models.extract_features(network, x, batch_size=batch_size)
    assert features.shape == (count, 64)
    assert not features.requires_grad
    with torch.no_grad():
        alone = torch.cat([network(each[None]) for each in x])
    assert torch.allclose(features, alone, atol=1e-6)


def test_features_can_be_trained_on():
    """They are ordinary tensors, not ones of inference mode."""
    features = models.extract_features(backbone(), torch.randn(4, 1, 6, 6))
    head = models.build("head", features=64, classes=2, hidden=8)
    head(features).sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_bad_examples_change_only_their_own_features():
    network, x = backbone(), torch.randn(8, 1, 6, 6)
    before = models.extract_features(network, x)
    x[2] = float("nan")
    x[5] = float("inf")
    after = models.extract_features(network, x)
    good = [0, 1, 3, 4, 6, 7]
    assert torch.equal(before[good], after[good])
    head = models.build("head", features=64, classes=2)
    assert head(after).isfinite().all()


def test_training_mode_is_refused_wherever_it_is():
    network = backbone()
    network[1].train()
    with pytest.raises(PrivacyError, match=r"'1' \(BatchNorm2d\) .* in training mode.*eval\(\)"):
        models.extract_features(network, torch.randn(4, 1, 6, 6))
    with pytest.raises(PrivacyError, match="training mode"):
        models.extract_features(nn.Sequential(nn.Flatten()), torch.randn(4, 1, 6, 6))


def frozen(function):
    return Function(function).eval()


COUPLED = {
    "batch mean": (lambda self, x: x - x.mean(dim=0), "with the other examples"),
    "batch norm without statistics": (
        lambda self, x: nn.functional.batch_norm(x, None, None, training=True),
        "with the other examples",
    ),
    "a trace of the batch": (lambda self, x: x + 1e-3 * x.sum(dim=0), "with the other examples"),
    "the neighbour": (lambda self, x: x.roll(1, dims=0), "with the other examples"),
    "the batch size": (lambda self, x: x / len(x), "with the size of its batch"),
    "chance": (lambda self, x: x + torch.randn_like(x), "computed again"),
}


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("kind", COUPLED)
def test_coupled_examples_are_refused(kind, count):
    function, match = COUPLED[kind]
    with pytest.raises(PrivacyError, match=match):
        models.extract_features(frozen(function), torch.randn(count, 5))


def test_equal_examples_do_not_hide_a_coupling():
    function, match = COUPLED["batch mean"]
    with pytest.raises(PrivacyError, match=match):
        models.extract_features(frozen(function), torch.ones(6, 5))


def test_coupling_of_integer_inputs_is_noticed():
    table = torch.randn(10, 4)
    tokens = torch.randint(10, (6, 3))
    assert models.extract_features(frozen(lambda self, t: table[t]), tokens).shape == (6, 12)
    with pytest.raises(PrivacyError, match="with the other examples"):
        models.extract_features(frozen(lambda self, t: table[t] + table[t].mean(0)), tokens)


def test_state_is_refused():
    def remember(self, x):
        self.seen += x.sum() * 1e-12  # too little for the experiment, but a write all the same
        return x

    def replace(self, x):
        self.seen = self.seen + 1
        return x

    for function in (remember, replace):
        with pytest.raises(PrivacyError, match="changed its parameters or buffers"):
            models.extract_features(frozen(function), torch.randn(4, 5))


def test_wrong_outputs_and_arguments_are_refused():
    x = torch.randn(4, 5)
    for function in (lambda self, x: (x, x), lambda self, x: x.sum(), lambda self, x: x[:1]):
        with pytest.raises(ValueError, match="one tensor with a row for each of 4 examples"):
            models.extract_features(frozen(function), x)
    with pytest.raises(ValueError, match="batch_size"):
        models.extract_features(frozen(lambda self, x: x), x, batch_size=0)
    with pytest.raises(ValueError, match="N >= 1"):
        models.extract_features(frozen(lambda self, x: x), x[:0])
