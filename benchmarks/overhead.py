"""What privacy costs: a private step over the same step of the same network, trained plainly.

The network is the paper's MNIST CNN. Private steps, private steps with product clipping, and plain
ones alternate in one process, so that whatever else the machine does hits all alike; the figures
are medians of the ratios of neighbouring steps.

    python benchmarks/overhead.py [--batch 1024] [--steps 40]
"""

import argparse
import copy
import itertools
import statistics
import time

import torch
from _results import save
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip


def mnist_cnn() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        lip.BoundedInput(norm=20.0),
        lip.SpectralConv2d(1, 32, 3),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(32, 64, 3),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        torch.nn.Flatten(),
        lip.SpectralLinear(1600, 512),
        lip.GroupSort(2),
        lip.SpectralLinear(512, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    count = 20 * options.batch
    data = TensorDataset(torch.rand(count, 1, 28, 28), torch.randint(10, (count,)))

    plain = mnist_cnn()
    steps = {"plain": plain_step(plain, options.batch)}
    for name, fraction in (("private", None), ("private, product clipping", 0.3)):
        steps[name] = private_step(copy.deepcopy(plain), data, options, fraction)

    times: dict[str, list[float]] = {name: [] for name in steps}
    for taken in range(options.steps + 3):
        for name, step in steps.items():
            seconds = step()
            if taken >= 3:  # the first steps allocate
                times[name].append(seconds)

    def ratio(name: str, base: str) -> float:
        pairs = zip(times[name], times[base], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 4)

    results = {
        "model": "MNIST CNN of the paper (2 convolutions, 2 dense layers)",
        "parameters": sum(p.numel() for p in plain.parameters()),
        "batch": options.batch,
        "steps": options.steps,
        "milliseconds": {
            name: round(1000 * statistics.median(seconds), 2) for name, seconds in times.items()
        },
        "private_over_plain": ratio("private", "plain"),
        "product_clipping_over_private": ratio("private, product clipping", "private"),
    }
    print(results)
    print("wrote", save("overhead-cpu", results, notes="medians of pairwise ratios").name)


def timed(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def plain_step(model, batch):
    criterion = losses.CrossEntropy(tau=18.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))

    def step():
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return lambda: timed(step)


def private_step(model, data, options, fraction):
    criterion = losses.CrossEntropy(tau=18.0)
    if fraction is not None:
        clipless.clip_products(model, fraction=fraction, loss=criterion, input_shape=(1, 28, 28))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(data, batch_size=options.batch),
        criterion=criterion,
        noise_multiplier=1.0,
        sampling="fixed_size",  # batches of one size, so that times can be compared
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(x, y):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    def next_step() -> float:
        x, y = next(batches)
        return timed(lambda: step(x, y))

    return next_step


if __name__ == "__main__":
    main()
