"""Small runs to audit, correct ones and deliberately broken ones.

A table of vectors, one row for each token, under a loss whose gradient has the same norm for every
example: each canary is a token of its own, its gradient reaches the bound at every step and no
other example shares its direction. Nothing is easier to audit.
"""

import contextlib
import copy
import itertools
from typing import Any

import torch
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.bounds import Bound, register, unregister
from clipless.privacy import PoissonSampling, PrivacyOptions
from clipless.training import Trainer, TrainingOptions


class LessNoise(Trainer):
    """Adds `part` of the noise that the ledger is told of."""

    part = 0.8

    def _make_private(self, *arguments):
        loader = super()._make_private(*arguments)
        session = self.engine.session
        vars(session.plan)["releases"] = [
            query._replace(deviation=query.deviation * self.part) for query in session.plan.releases
        ]
        return loader


class HalvedNoise(LessNoise):
    """Adds half the noise that the ledger is told of."""

    part = 0.5


class NotEnforced(Trainer):
    """Lets gradients be what the layers make them, whatever their bounds are."""

    def _make_private(self, *arguments):
        loader = super()._make_private(*arguments)
        session = self.engine.session
        session.trial.due_at = 10**9
        for call in session.enforcement._calls:
            call._uses = tuple(dict.fromkeys(each, float("inf")) for each in call._uses)
            layer: Any = call.module
            call._prepared = [layer.prepared(limits) for limits in call._uses]
        return loader


class FakedSampling(Trainer):
    """Draws one batch and uses it in every step; the ledger is told of a fresh one each time."""

    def _make_private(self, *arguments):
        loader = super()._make_private(*arguments)
        sampler = loader._sampler
        draw = sampler.draw
        kept: dict[str, Any] = {}

        def once(step):
            if not kept:  # the sampler itself forgets the key of a step that is over
                kept["sample"] = draw(step=step)
            return kept["sample"]

        vars(sampler)["draw"] = once
        return loader


class Amplify(nn.Module):
    """Multiplies by a factor, four by default, and has a rule that says it does not."""

    def __init__(self, factor=4.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


@contextlib.contextmanager
def wrong_rule():
    """The rule of somebody who forgot a factor."""

    @register(Amplify)
    def amplify(site, x):
        return Bound(lipschitz=1.0, output=x.norm, rows_apart=True)

    try:
        yield
    finally:
        unregister(Amplify)


def table(tokens, *extra):
    torch.manual_seed(0)
    return nn.Sequential(lip.Embedding(tokens, 2), nn.Flatten(), *extra)


def table_trainer(
    tokens, *, kind=Trainer, noise, steps, seed, rate=None, extra=(), fixed=None, lr=0.1, **options
):
    """A maker of trainers of a table: full batch, Poisson with a rate, or of fixed size.

    `seed` may be an iterator, for makers that are called often. All trainers of a maker share the
    model, which is traced once that way, and begin with the same weights.
    """
    seeds = seed if not isinstance(seed, int) else itertools.repeat(seed)
    model = table(tokens, *extra)
    weights = copy.deepcopy(model.state_dict())

    def make(size):
        model.load_state_dict(weights)
        sampling: Any = "full_batch"
        batch_size = size
        if rate is not None:
            sampling = PoissonSampling(dataset_size=size, rate=rate)
            batch_size = max(1, round(rate * size))
        if fixed is not None:
            sampling, batch_size = "fixed_size", fixed
        return kind(
            model,
            losses.KantorovichRubinstein(),
            noise_multiplier=noise,
            steps=steps,
            batch_size=batch_size,
            target_delta=3e-6,
            **options,
            options=PrivacyOptions(sampling=sampling),
            training=TrainingOptions(
                insecure_seed=next(seeds),
                optimizer=lambda p: torch.optim.SGD(p, lr=lr),
                scheduler=None,
                average=None,
            ),
        )

    return make


def tokens(count):
    """Every token once, with a label by turns."""
    return torch.arange(count)[:, None], torch.arange(count) % 2


def background(size=4):
    """A few ordinary examples; tokens below `size` are theirs."""
    return torch.arange(size)[:, None], torch.zeros(size).long()
