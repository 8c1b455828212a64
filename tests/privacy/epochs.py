"""Runs over ordinary epochs, and what they really added and paid, for several test files."""

import torch

from clipless.common import watched_by
from tests.privacy.runs import Run, examples


class Watcher:
    """Sees every release before and after its noise."""

    def __init__(self):
        self.before, self.after, self.queries = [], [], []

    def release(self, values, queries, add_noise):
        self.before.append(torch.cat([value.double().flatten() for value in values]))
        add_noise()
        self.after.append(torch.cat([value.double().flatten() for value in values]))
        sizes = [value.numel() for value in values]
        self.queries.append(list(zip(queries, sizes, strict=True)))

    def bits(self, count):
        return 1 << (count - 1)

    def public(self, kind, value):
        pass

    def empty_row(self, size):
        return None

    @property
    def noise(self):
        """The noise of each step in deviations of its parameter, (steps, entries)."""
        rows = []
        for before, after, queries in zip(self.before, self.after, self.queries, strict=True):
            scale = torch.cat([torch.full((count,), query.deviation) for query, count in queries])
            rows.append((after - before) / scale)
        return torch.stack(rows)


def epochs_run(size=23, batch_size=5, steps=12, noise="correlated", **options):
    """A run over epochs; `data_loader` has no shuffling."""
    options.setdefault("data", examples(size))
    return Run(
        batch_size=batch_size, sampling="epochs", noise=noise, steps=steps, **options
    )  # fmt: skip


def watched(run, steps):
    """Take steps; return what was released, and which examples took part in each."""
    watcher, draw = Watcher(), run.batch
    taken: list[list[int]] = []

    def batch():
        found = draw()
        taken[-1] += run.loader.current.indices.tolist()
        return found

    run.batch = batch
    with watched_by(watcher):
        for _ in range(steps):
            taken.append([])
            run.step()
    run.batch = draw
    return watcher, taken


def paid(run):
    """The squared sensitivity that the ledger has paid for, in units of one contribution."""
    sigma = run.engine.plan.noise_multiplier
    return sum(
        count * (sigma / mechanism.noise_multiplier) ** 2
        for mechanism, count in run.engine.ledger.history()
    )
