"""What it costs to enforce bounds: a private step over the same step whose layers are not bounded.

The network is the paper's MNIST CNN. Steps with and without enforcement alternate in one process,
so that whatever else the machine does hits both alike; the figure is the median of the ratios of
neighbouring steps. Without enforcement nothing is private: it is there to be measured against.

    python benchmarks/enforcement.py [--batch 1024] [--steps 40] [--compile]
"""

import argparse
import contextlib
import itertools
import statistics
import time

import torch
from _results import save
from overhead import mnist_cnn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.privacy import BatchOptions, PrivacyOptions


def step_of(data: TensorDataset, options: argparse.Namespace, *, enforced: bool):
    model = mnist_cnn().to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = losses.CrossEntropy(tau=10.0)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=options.batch),
        compile=options.compile,
        options=PrivacyOptions(batches=BatchOptions(pad=True)),
    )
    if not enforced:
        session = engine.session
        session.enforcement.stand_in = contextlib.nullcontext
        session.enforcement.begin_pass = lambda: None
        session.enforcement.leaves = session._trainable
        session.trial.due_at, session.trial.check = float("inf"), lambda *_: None
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> float:
        x, y = next(batches)
        begun = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    count = 20 * options.batch
    images = torch.rand(count, 1, 28, 28, device=options.device)
    data = TensorDataset(images, torch.randint(10, (count,), device=options.device))
    steps = {each: step_of(data, options, enforced=each) for each in (False, True)}
    times: dict[bool, list[float]] = {each: [] for each in steps}
    for taken in range(options.steps + 5):
        for each, step in steps.items():
            seconds = step()
            if taken >= 5 and taken & (taken - 1):  # at powers of two the model is tried
                times[each].append(seconds)
    ratios = [on / off for off, on in zip(times[False], times[True], strict=True)]
    results = {
        "batch": options.batch,
        "compiled": options.compile,
        "enforced over not": round(statistics.median(ratios), 3),
        "milliseconds": {
            "not enforced": round(1e3 * statistics.median(times[False]), 1),
            "enforced": round(1e3 * statistics.median(times[True]), 1),
        },
    }
    print(results)
    save(f"enforcement-{options.device}{'-compiled' * options.compile}", results)


if __name__ == "__main__":
    main()
