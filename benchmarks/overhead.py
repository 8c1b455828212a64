"""What privacy costs: a private step over the same step of the same network, trained plainly.

The network is the paper's MNIST CNN. Private and plain steps alternate in one process, so that
whatever else the machine does hits both alike; the ratio of medians is the figure.

    python benchmarks/overhead.py [--batch 1024] [--steps 40]
"""

import argparse
import copy
import statistics
import time

import torch
from _results import save
from torch.utils.data import DataLoader, TensorDataset

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

    private = mnist_cnn()
    plain = copy.deepcopy(private)
    plain_criterion = losses.CrossEntropy(tau=18.0)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    criterion = losses.CrossEntropy(tau=18.0)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=private,
        optimizer=torch.optim.SGD(private.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(data, batch_size=options.batch),
        criterion=criterion,
        noise_multiplier=1.0,
        steps=options.steps,
    )

    def step(model, criterion, optimizer, x, y) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"private": [], "plain": []}
    taken = 0
    while taken < options.steps + 3:
        for x, y in loader:
            pair = {
                "private": step(private, criterion, optimizer, x, y),
                "plain": step(plain, plain_criterion, plain_optimizer, x, y),
            }
            taken += 1
            if taken > 3:  # the first steps allocate
                for name, seconds in pair.items():
                    times[name].append(seconds)
            if taken == options.steps + 3:
                break

    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["private"], times["plain"], strict=True))
    results = {
        "model": "MNIST CNN of the paper (2 convolutions, 2 dense layers)",
        "parameters": sum(p.numel() for p in private.parameters()),
        "batch": options.batch,
        "steps": options.steps,
        "private_milliseconds": round(1000 * medians["private"], 2),
        "plain_milliseconds": round(1000 * medians["plain"], 2),
        "ratio": round(ratio, 4),
    }
    print(results)
    print("wrote", save("overhead-cpu", results, notes="ratio: median of pairwise ratios").name)


if __name__ == "__main__":
    main()
