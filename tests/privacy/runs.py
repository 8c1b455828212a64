"""Small private runs that several test files use."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.privacy import (
    BatchOptions,
    Ledger,
    PrivacyOptions,
    PrivateLoader,
    Relation,
    RenyiFilter,
)


def mlp(classes=3):
    return nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(6, 8, bias=True),
        lip.GroupSort(2),
        lip.SpectralLinear(8, classes),
    )


def cnn(classes=3):
    return nn.Sequential(
        lip.BoundedInput(2.0),
        lip.SpectralConv2d(1, 4, 3, stride=2, padding="same", bias=True),
        lip.MaxMin(),
        lip.ScaledL2NormPool2d(2),
        nn.Flatten(),
        lip.SpectralLinear(4, classes),
    )


def residual(classes=3):
    return nn.Sequential(
        lip.BoundedInput(2.0),
        lip.SpectralConv2d(1, 4, 3, padding="same"),
        lip.Residual(nn.Sequential(lip.SpectralConv2d(4, 4, 3, padding="same"), lip.GroupSort(2))),
        lip.ScaledGlobalAvgPool2d(),
        lip.SpectralLinear(4, classes),
    )


SHAPES = {mlp: (6,), cnn: (1, 4, 4), residual: (1, 4, 4)}


def examples(count, shape=(6,), classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    y = torch.randint(classes, (count,), generator=generator)
    return x, y


def filtered_engine(size=100, epsilon=60.0, order=3.0):
    """An engine whose noise may be changed after a release; the budget is a large one."""
    declared = RenyiFilter(epsilon=epsilon, delta=1e-4, order=order)
    ledger = Ledger.in_memory(dataset_size=size, relation=Relation.ZERO_OUT, filter=declared)
    return PrivacyEngine(ledger=ledger)


def privacy_options(**fields):
    """`PrivacyOptions` from flat fields; those of `BatchOptions` go there."""
    names = {field.name for field in dataclasses.fields(BatchOptions)} & fields.keys()
    batches = {name: fields.pop(name) for name in names}
    if batches:
        fields["batches"] = BatchOptions(**batches)
    return PrivacyOptions(**fields)


def engine_arguments(make, given):
    """Arguments of a method of the engine: what it does not take itself goes into `options`."""
    own = inspect.signature(make).parameters
    rest = {name: value for name, value in given.items() if name not in own}
    kept = {name: value for name, value in given.items() if name in own}
    return kept | ({"options": privacy_options(**rest)} if rest else {})


def private_loader(data, **given):
    """A `PrivateLoader` from flat keywords: its own, of `BatchOptions`, and of `DataLoader`."""
    names = {field.name for field in dataclasses.fields(BatchOptions)} & given.keys()
    batches = BatchOptions(**{name: given.pop(name) for name in names})
    own = inspect.signature(PrivateLoader).parameters
    reading = {name: given.pop(name) for name in given.keys() - own.keys()}
    data = DataLoader(data, **reading) if reading else data
    return PrivateLoader(data, batches=batches, **given)


class Run:
    """Everything of one private run, with an ordinary training loop."""

    def __init__(
        self, model=None, data=None, criterion=None, batch_size=20, engine=None, lr=0.1,
        optimizer=None, **options,
    ):  # fmt: skip
        self.model = mlp() if model is None else model
        data = examples(100) if data is None else data
        self.criterion = losses.CrossEntropy() if criterion is None else criterion
        self.engine = PrivacyEngine(insecure_seed=0) if engine is None else engine
        optimizer = optimizer or torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=lr
        )
        if "target_epsilon" in options:
            make: Callable[..., Any] = self.engine.make_private_with_epsilon
        else:
            make = self.engine.make_private
            options.setdefault("noise_multiplier", 1.0)
        self.model, self.optimizer, self.loader = make(
            module=self.model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(*data), batch_size=batch_size),
            criterion=self.criterion,
            **engine_arguments(make, options),
        )
        self._batches: Iterator[Any] = iter(())

    def batch(self):
        """The next batch, over as many epochs as it takes."""
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        return next(self._batches)

    def backward(self, x, y):
        loss = self.criterion(self.model(x), y)
        loss.backward()
        return loss

    def step(self):
        """One whole step, however many micro-batches it has."""
        self.optimizer.zero_grad()
        while True:
            self.backward(*self.batch())
            sample = self.loader.current
            assert sample is not None
            if sample.is_last:
                break
        self.optimizer.step()

    def gradients(self):
        """The gradients of the step under way, which nobody else gets to see without noise."""
        progress = self.engine.session._book.progress
        assert progress is not None
        names = [p.name for p in self.engine.plan.parameters]
        return {names[index]: g.clone() for index, g in progress.gradients.items()}

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self
